"""Texts within the bounds of a schema, as they stand without quotes up to a mark: their length, patterns and format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.api.parsers.alternatives import refused
from weft.api.parsers.json_text import MAX_DEPTH
from weft.api.parsers.rules import ANYTHING, Rules, escaped, is_token
from weft.engine.structured.grammar import regex
from weft.engine.structured.unknown import problem_of_lark, problem_of_schema
from weft.errors import RequestError

MAX_MINIMUM = 100_000  # largest minLength or minItems of a schema
_DATE = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,8}}"
_HEX = "[0-9a-fA-F]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P(?:[0-9]{1,6}W|[0-9]{1,6}D|(?:[0-9]{1,6}D)?T[0-9]{1,6}[HMS])",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+){{0,8}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": f"{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}|(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,2}})?::"
    f"(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{0,2}})?",
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": "[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]+",
}
FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")  # before the pattern, for all of it


def text_until(rules: Rules, schema: Mapping[str, Any], closing: str) -> str:
    """Lark for a text within its schema's bounds, up to `closing`, and that."""
    token = rules.mark(closing)
    expressions = _expressions(schema)
    if not expressions and (is_token(token) or closing == closing.strip()):
        return rules.text_until(closing)
    if is_token(token):
        return f"{_joined(rules, expressions)} {token}"
    end, mark = escaped(closing), escaped(closing.strip())
    after = len(closing) - len(closing.rstrip())
    expressions = expressions or [ANYTHING]
    bounded = [f"/(?:{expression}){end}/" for expression in expressions]
    return rules.terminal(f"{' & '.join(bounded)} & ~/{ANYTHING}{mark}(?s:.{{{after + 1},}})/")


def bounds_of(schema: Mapping[str, Any], least_key: str, most_key: str) -> tuple[int, int | None]:
    """The least and the most that a schema allows. Raises RequestError for bounds that nothing meets."""
    least, most = (_number(schema.get(key)) for key in (least_key, most_key))
    if least is not None and least > MAX_MINIMUM:
        raise refused(f"{least_key} is {least:,}; the limit is {MAX_MINIMUM:,}", "grammar-too-large")
    if least is not None and most is not None and least > most:
        raise refused(f"{least_key} ({least:,}) is greater than {most_key} ({most:,})")
    return least or 0, most


def _expressions(schema: Mapping[str, Any]) -> list[str]:
    """Expressions that a text has to match, all of them; none for any text."""
    least, most = bounds_of(schema, "minLength", "maxLength")
    length = [f"(?s:.{{{least},{'' if most is None else most}}})"] if least or most is not None else []
    patterns = [pattern_expression(pattern) for pattern in _texts(schema.get("pattern"))]
    formats = [FORMATS[name].replace("/", "\\/") for name in _texts(schema.get("format")) if name in FORMATS]
    return [*length, *patterns, *formats]


def _texts(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _joined(rules: Rules, expressions: Sequence[str]) -> str:
    """Lark for a text that all of these expressions match."""
    if len(expressions) == 1:
        return f"/{expressions[0]}/"
    return rules.terminal(" & ".join(f"/{expression}/" for expression in expressions))


def _number(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


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
