"""Patterns of JSON schemas: expressions of the whole texts in which such a pattern is found."""

from __future__ import annotations

import re
from collections.abc import Iterator

from weft.api.parsers.alternatives import refused
from weft.api.parsers.json_text import MAX_DEPTH
from weft.api.parsers.rules import ANYTHING
from weft.engine.structured.grammar import regex
from weft.engine.structured.unknown import problem_of_lark, problem_of_schema
from weft.errors import RequestError

FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")  # before the pattern, for all of it


def pattern_expression(pattern: str) -> str:
    """Expression of the texts in which a pattern is found. Raises RequestError if the compiler refuses the pattern."""
    problem = problem_of_schema({"type": "string", "pattern": pattern})
    flags = FLAGS.match(pattern)
    inner = pattern[flags.end() :] if flags else pattern
    try:
        lark = regex(_found(inner, flags[1] if flags else "", 0))[1:-1]
    except (ValueError, RequestError) as error:
        problem = problem or str(error)
        lark = ""
    if not problem:
        problem = problem_of_lark(f"start: /{lark}/")
    if problem:
        raise refused(f"the schema cannot be compiled, at pattern {pattern!r:.200}: {problem}")
    return lark


def _found(pattern: str, flags: str, depth: int) -> str:
    """Expression of the texts in which one of the pattern's alternatives is found, each with its own anchors."""
    ways = []
    for way in _split(pattern):
        begins, ends = way.startswith("^"), _ends(way)
        inner = way[begins : len(way) - ends]
        if not (begins or ends) and depth < MAX_DEPTH and (group := _whole_group(inner)) is not None:
            ways.append(_found(group, flags, depth + 1))
            continue
        ways.append(f"{'' if begins else ANYTHING}(?{flags}:{inner}){'' if ends else ANYTHING}")
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _ends(way: str) -> bool:
    """True for an alternative with an anchor at its end."""
    before = way[:-1]
    return way.endswith("$") and not (len(before) - len(before.rstrip("\\"))) % 2


def _split(pattern: str) -> list[str]:
    """The alternatives of a pattern."""
    cuts = [at for at, letter, depth in _outside_classes(pattern) if letter == "|" and not depth]
    return [pattern[begin:end] for begin, end in zip([0, *(at + 1 for at in cuts)], [*cuts, len(pattern)], strict=True)]


def _whole_group(pattern: str) -> str | None:
    """The inside of a plain group that is the whole pattern; None for another pattern."""
    if not pattern.startswith("(") or (pattern.startswith("(?") and not pattern.startswith("(?:")):
        return None
    closed = next((at for at, letter, depth in _outside_classes(pattern) if letter == ")" and not depth), None)
    return pattern[3 if pattern.startswith("(?:") else 1 : -1] if closed == len(pattern) - 1 else None


def _outside_classes(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The letters of a pattern that are neither escaped nor in a class, with places and the depth of groups there."""
    depth = nested = 0  # of groups and of classes
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 2
            continue
        opens, closes = letter == "[", letter == "]" and nested > 0
        nested += opens - closes
        if not nested and not closes:
            depth += (letter == "(") - (letter == ")")
            yield at, letter, depth
        if opens:
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"  # the first bracket of a class is a plain letter
        at += 1
