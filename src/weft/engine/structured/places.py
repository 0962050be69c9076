"""Places of problems: why a JSON schema cannot be compiled, and which part of it is the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_PLACES = 256  # parts of a schema that are tried to find a mistake's place


def placed(schema: Mapping[str, Any], problem: str) -> str:
    """The problem of a schema with the innermost part of it that has it too."""
    place = "$"
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    tries = iter(range(MAX_PLACES))
    inner = _problem_inside(schema, shared, tries)
    while inner is not None:
        step, part, problem = inner
        place += step
        inner = _problem_inside(part, shared, tries)
    return f"the schema cannot be compiled, at {place}: {problem}"


def _problem_inside(
    schema: Mapping[str, Any], shared: Mapping[str, Any], tries: Iterator[int]
) -> tuple[str, Mapping[str, Any], str] | None:
    """The way to the first schema directly inside this one that cannot be compiled, the schema, and its problem.

    None if there is no such schema, or if `tries`, of which each schema takes one, are used up.
    """
    for (step, inner), _ in zip(sub_schemas(schema), tries, strict=False):
        problem = problem_of({**shared, **inner})
        if problem:
            return step, inner, problem
    return None


def problem_of(schema: Mapping[str, Any]) -> str:
    """Why a schema by itself cannot be compiled; "" if it can."""
    from llguidance import LLMatcher

    text = json.dumps({"grammars": [{"json_schema": schema}]})
    failed, messages = LLMatcher.validate_grammar_with_warnings(text)
    return first_line(messages[0]) if failed else ""


def sub_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, each with the way to it."""
    yield from ((step, part) for step, part in _parts_of_schema(schema) if isinstance(part, Mapping))


def _parts_of_schema(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a schema where others may stand, each with the way to it."""
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        named = schema.get(key)
        if isinstance(named, Mapping):
            yield from ((f".{key}.{name}", part) for name, part in named.items())
    for key in ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"):
        yield f".{key}", schema.get(key)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        several = schema.get(key)
        if isinstance(several, list):
            yield from ((f".{key}[{at}]", part) for at, part in enumerate(several))


def first_line(message: str) -> str:
    """The first line of the library's message, cut to what a person reads, and in a user's words."""
    if "coerce_one_of" in message:
        return "a value may follow several of the schemas of oneOf, which cannot be prevented; use anyOf"
    lines = [line.strip() for line in message.split("<state>")[0].strip().splitlines() if line.strip()]
    return " ".join(lines)[:300] or "unknown reason"
