"""Bounds on schemas and grammars, checked before the library reads them: it recurses along references.

All of it is iterative. A grammar that passes here is compiled in a sandboxed process first
(`engine.structured.examiner`), which finds the costs that no count tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import count
from typing import Any

from weft.engine.structured.plain_schemas import NESTING
from weft.engine.structured.references import steps_of
from weft.errors import RequestError

CHAIN = 256  # definitions or rules that refer to one another, one after the other
DEFINITIONS = 2_000  # of a schema
PROPERTIES = 2_000  # of a schema, of all its objects together
CHOICES = 50_000  # values of `enum` of a schema, or texts of `choice`
MULTIPLE = 100_000  # largest `multipleOf` but for powers of ten: the library has a state for each remainder
RULES = 10_000  # of a grammar
REACHED = 200_000  # lists and objects in the targets of references, all together; targets may lie inside each other

# A grammar in Lark, cut into what may hold a name and what may not. No repetition gives back what it took, and a text
# without an end goes to the line's end: else the time is quadratic, during which no other thread runs.
LARK_PARTS = re.compile(
    r"""
      //[^\n]*+ | \#[^\n]*+                      # comments
    | "(?:[^"\\\n]|\\.)*+"?                      # texts, also in JSON
    | /(?:[^/\\\n]|\\.)++/?                      # expressions
    | (?P<rule>(?:^|(?<=\n))[ \t]*+[!?]*+(?P<head>[A-Za-z_][A-Za-z0-9_]*+)[^:"/\n|]*+:)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*+)
    """,
    re.VERBOSE,
)


def check_schema(schema: Any, param: str) -> None:
    """Raise RequestError for a schema that is too deep, too large, or whose references form too long a chain."""
    counts = {"properties": 0, "patternProperties": 0, "enum": 0, "$defs": 0, "definitions": 0}
    for key, value in _keywords(schema, param):
        if key in counts and isinstance(value, Mapping | list):
            counts[key] += len(value)
        elif key == "multipleOf":
            _check_multiple(value, param)
    for what, number, most in (
        ("properties", counts["properties"] + counts["patternProperties"], PROPERTIES),
        ("values of enum", counts["enum"], CHOICES),
        ("definitions", counts["$defs"] + counts["definitions"], DEFINITIONS),
    ):
        if number > most:
            raise _too_large(f"the schema has {number:,} {what}; the limit is {most:,}", param)
    _check_chain(_references(schema, param), "$ref", param)


def check_choices(texts: Sequence[str], param: str) -> None:
    """Raise RequestError for too many texts."""
    if len(texts) > CHOICES:
        raise _too_large(f"choice has {len(texts):,} texts; the limit is {CHOICES:,}", param)


def check_lark(grammar: str, param: str) -> None:
    """Raise RequestError for a grammar with too many rules, or whose rules form too long a chain."""
    rules: dict[str, list[str]] = {}
    current: list[str] = []
    for match in LARK_PARTS.finditer(grammar):
        if match["head"]:
            current = rules.setdefault(match["head"], [])
        elif match["name"]:
            current.append(match["name"])
    if len(rules) > RULES:
        raise _too_large(f"the grammar has {len(rules):,} rules; the limit is {RULES:,}", param)
    _check_chain({name: [other for other in names if other in rules] for name, names in rules.items()}, "rules", param)


def _keywords(schema: Any, param: str) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of a schema, however deep. Raises RequestError for a schema that is nested too
    deeply."""
    pending = [(schema, 0)]
    while pending:
        part, depth = pending.pop()
        if depth > NESTING:
            raise _too_large(f"the schema is nested more than {NESTING} deep", param)
        if isinstance(part, Mapping):
            yield from part.items()
            pending += [(value, depth + 1) for value in part.values() if isinstance(value, Mapping | list)]
        elif isinstance(part, list):
            pending += [(value, depth + 1) for value in part if isinstance(value, Mapping | list)]


def _check_multiple(value: Any, param: str) -> None:
    try:
        digits = int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))
        large = abs(Decimal(str(value))) > MULTIPLE or digits > MULTIPLE
    except (InvalidOperation, ValueError, OverflowError):
        return  # no number: the library says so
    if large and digits != 1:
        raise _too_large(
            f"multipleOf {value!r:.40} is too large; the limit is {MULTIPLE:,}, of five digits, or a power of ten",
            param,
        )


def _references(schema: Any, param: str) -> dict[str, list[str]]:
    """The targets of references of a schema, each with the targets that it refers to; the whole is "#".

    Raises RequestError if that takes too many steps.
    """
    targets: dict[str, list[str]] = {}
    pending = ["#"]
    steps = count(1)
    while pending:
        name = pending.pop()
        if name not in targets:
            targets[name] = list(_references_inside(_target(schema, name), steps, param))
            pending += targets[name]
    return targets


def _references_inside(part: Any, steps: Iterator[int], param: str) -> Iterator[str]:
    pending = [part]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping | list) and next(steps) > REACHED:
            raise _too_large(
                f"the schema's references lead to more than {REACHED:,} parts, counted once for each; use fewer", param
            )
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            pending += [value for key, value in part.items() if key not in ("$defs", "definitions")]
        elif isinstance(part, list):
            pending += part


def _target(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference such as "#/$defs/name" names; None for another form."""
    if not reference.startswith("#"):
        return None
    part = schema
    for step in steps_of(reference):
        if isinstance(part, list):
            part = part[int(step)] if step.isdecimal() and len(step) < 9 and int(step) < len(part) else None
        else:
            part = part.get(step) if isinstance(part, Mapping) else None
    return part


def _check_chain(graph: Mapping[str, Sequence[str]], what: str, param: str) -> None:
    longest = longest_chain(graph)
    if longest > CHAIN:
        raise _too_large(
            f"{longest:,} {what} refer to one another, one after the other; the limit is {CHAIN}; use fewer, or write "
            "them where they are used",
            param,
        )


def longest_chain(graph: Mapping[str, Iterable[str]]) -> int:
    """Number of nodes on the longest way through a graph; nodes that reach each other all count."""
    lengths: dict[str, int] = {}
    for component in _components(graph):  # each after the sets that it leads to
        members = set(component)
        beyond = (lengths[target] for node in component for target in graph.get(node, ()) if target not in members)
        length = len(component) + max(beyond, default=0)
        lengths.update(dict.fromkeys(component, length))
    return max(lengths.values(), default=0)


def _components(graph: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Yield sets of nodes that reach each other, each after the sets that it leads to (Tarjan's algorithm)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    for root in graph:
        if root in numbers:
            continue
        work = [(root, iter(graph.get(root, ())))]
        numbers[root] = lowest[root] = len(numbers)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    parent = work[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == numbers[node]:
                    component = [stack.pop()]
                    while component[-1] != node:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    yield component
            elif target not in numbers:
                numbers[target] = lowest[target] = len(numbers)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(graph.get(target, ()))))
            elif target in on_stack:
                lowest[node] = min(lowest[node], numbers[target])


def _too_large(problem: str, param: str) -> RequestError:
    return RequestError(problem, param=param, code="grammar-too-large")
