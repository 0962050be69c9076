"""Alternatives of a schema: plain schemas without references and combinators. A value has to match one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from weft.api.parsers.json_text import MAX_DEPTH
from weft.api.parsers.schemas import TYPES, resolve, types_of
from weft.engine.structured.grammar import with_options
from weft.engine.structured.unknown import problem_of_schema
from weft.errors import RequestError

MAX_ALTERNATIVES = 256  # alternatives of one schema
MAX_PARTS = 2048  # limit on the schemas that combinators and references of a schema lead to
MIN_BOUNDS = {"minLength": max, "minItems": max, "minimum": max, "exclusiveMinimum": max}
MAX_BOUNDS = {"maxLength": min, "maxItems": min, "maximum": min, "exclusiveMaximum": min}
BOUNDS = MIN_BOUNDS | MAX_BOUNDS
WHOLE = "whole-schema"  # definition that is the schema itself
DEFINITIONS = ("#/$defs/", "#/definitions/")
Plain = dict[str, Any]


def refused(problem: str, code: str = "invalid-grammar") -> RequestError:
    """The error for tools without a possible grammar of their arguments."""
    return RequestError(problem, param="tools", code=code)


def checked(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's schema in which all references name definitions, also references to the whole schema.

    Raises RequestError, with the place, for a schema that the compiler of JSON grammars refuses.
    """
    try:
        lenient = with_options(schema, param="tools", lenient=True)
        text = json.dumps(lenient)
    except RecursionError:
        raise refused("the schema is too deeply nested") from None
    if problem := problem_of_schema(lenient):
        raise refused(problem)
    definitions = schema.get("$defs")
    held = definitions if isinstance(definitions, Mapping) else {}
    if '"$ref": "#' not in text:
        return schema
    own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    return {**_named(schema), "$defs": {**_named(held), WHOLE: _named(own)}}


def _named(schema: Any) -> Any:
    """A part of a schema whose references outside the definitions name the definition WHOLE."""
    if isinstance(schema, list):
        return [_named(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    named = {key: _named(value) for key, value in schema.items()}
    reference = named.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not reference.startswith(DEFINITIONS):
        named["$ref"] = f"#/$defs/{WHOLE}{reference[1:]}"
    return named


def alternatives(schema: Any, root: Any) -> list[Plain]:
    """The plain schemas of a schema, whose definitions are in `root`; at least one. Raises RequestError."""
    plain_schemas = _expanded(schema, root, 0, iter(range(MAX_PARTS)))
    if not plain_schemas:
        raise refused(f"no value follows the schema {schema!r:.200}")
    return plain_schemas


def _expanded(schema: Any, root: Any, depth: int, left: Iterator[int]) -> list[Plain]:
    _check_size(schema, depth, left)
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        return [{}]
    schema = resolve(schema, root)
    if "$ref" in schema:
        raise refused(f"unknown reference: {schema['$ref']!r:.80}")
    plain_schemas = [{key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "allOf")}]
    for way in _ways(schema):
        others = [plain for part in way for plain in _expanded(part, root, depth + 1, left)]
        if len(plain_schemas) * len(others) > MAX_ALTERNATIVES:
            raise refused(f"a schema has more than {MAX_ALTERNATIVES} alternatives", "grammar-too-large")
        plain_schemas = [_merged(one, other) for one in plain_schemas for other in others]
    return [plain for one in plain_schemas for plain in _single_typed(one)]


def _check_size(schema: Any, depth: int, left: Iterator[int]) -> None:
    """Take a step from `left`, the remaining expansions. Raises RequestError for too many or too deep schemas."""
    if depth > MAX_DEPTH:
        raise refused(f"the schema is too deeply nested, or a definition is nothing but itself: {schema!r:.80}")
    if next(left, None) is None:
        raise refused(f"a schema leads to more than {MAX_PARTS:,} others", "grammar-too-large")


def _ways(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Lists of schemas: a value matches a schema of each list."""
    ways = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    parts = schema.get("allOf")
    return [*ways, *([part] for part in parts)] if isinstance(parts, list) else ways


def _single_typed(schema: Plain) -> list[Plain]:
    """The schema for each of its types that is possible."""
    if "type" not in schema:
        return [schema]
    given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for kind in given:
        if not isinstance(kind, str) or kind not in TYPES:
            raise refused(f"Invalid type: {kind!r:.80}")
    if choices_of(schema) is None:
        return [{**schema, "type": kind} for kind in given]
    fitting = [value for value in choices_of(schema) or [] if types_of(value) & set(given)]
    rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
    return [{**rest, "enum": fitting}] if fitting else []


def choices_of(schema: Any) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _merged(one: Plain, other: Plain) -> Plain:
    """The schema of values that match both schemas."""
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        merged[key] = _both(key, one[key], other[key])
    if choices_of(one) is not None and choices_of(other) is not None:
        merged.pop("const", None)
        allowed = list(map(json.dumps, choices_of(other) or []))
        merged["enum"] = [value for value in choices_of(one) or [] if json.dumps(value) in allowed]
    return merged


def _both(key: str, one: Any, other: Any) -> Any:
    """Value of a keyword that restricts as much as two values of it together."""
    if one == other:
        return one
    match key, one, other:
        case "type", _, _:
            return _common_types(one, other)
        case "required", list(), list():
            return [*one, *(name for name in other if name not in one)]
        case "properties", Mapping(), Mapping():
            shared = {name: _all_of(one[name], other[name]) for name in one.keys() & other.keys()}
            return {**one, **other, **shared}
        case "items" | "additionalProperties", _, _:
            return False if False in (one, other) else _all_of(one, other)
        case "pattern" | "format", _, _:
            return [*_listed(one), *_listed(other)]
        case _ if key in BOUNDS and isinstance(one, int | float) and isinstance(other, int | float):
            return BOUNDS[key](one, other)
    return other


def _common_types(one: Any, other: Any) -> list[Any]:
    first, second = _listed(one), _listed(other)
    common = [kind for kind in first if kind in second]
    if "integer" in (*first, *second) and "number" in (*first, *second) and "integer" not in common:
        common += ["integer"]
    return common


def _all_of(one: Any, other: Any) -> Any:
    return one if one == other else {"allOf": [one, other]}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
