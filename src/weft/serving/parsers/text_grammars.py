"""Grammars of tool calls whose arguments are text between marks: qwen3_coder, glm45, gemma and pythonic.

A string stands there without quotes, so that its bounds cannot be those of JSON: they are expressions of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import RequestError
from weft.serving.parsers import text_formats
from weft.serving.parsers.rules import ANYTHING, Rules, escaped, is_token, json_rule
from weft.serving.parsers.schemas import TYPES, resolve
from weft.structured.grammar import quoted, regex

LOOKING = re.compile(r"\(\?[^:]")  # a group that is no plain one: a look ahead or back
_COMMA = ' "," '  # Lark between two parts
Argument = Callable[[str, Any], str]  # Lark of an argument by its key and its schema


def qwen3_coder(rules: Rules, name: str, schema: Any) -> str:
    begin, end = rules.mark("<tool_call>"), rules.mark("</tool_call>")
    closing = f"\n{text_formats.PARAMETER_END}\n"

    def argument(key: str, part: Any) -> str:
        return f"{quoted(f'<parameter={key}>' + chr(10))} {_plain_value(rules, schema, part, closing)}"

    arguments = _arguments(schema, argument)
    return rules.add(f'{begin} {quoted(f"{chr(10)}<function={name}>{chr(10)}")} {arguments} "</function>\\n" {end}')


def glm45(rules: Rules, name: str, schema: Any) -> str:
    begin, key_begin, key_end = map(rules.mark, ("<tool_call>", text_formats.KEY, text_formats.KEY_END))
    value_begin = rules.mark(text_formats.VALUE)

    def argument(key: str, part: Any) -> str:
        value = _plain_value(rules, schema, part, text_formats.VALUE_END)
        return f'{key_begin} {quoted(key)} {key_end} "\\n" {value_begin} {value} "\\n"'

    arguments = _arguments(schema, argument)
    return rules.add(f"{begin} {quoted(name + chr(10))} {arguments} {rules.mark('</tool_call>')}")


def pythonic_call(rules: Rules, name: str, schema: Any) -> str:
    def argument(key: str, part: Any) -> str:
        resolved = resolve(part, schema)
        boolean = isinstance(resolved, Mapping) and resolved.get("type") == "boolean"
        value = '("True" | "False")' if boolean else _json(schema, part)
        if is_text(resolved) and not resolved.keys() & BOUNDS:
            value = f"({value} | /'([^'\\\\\\x00-\\x1f]|\\\\['\\\\])*'/)"
        return f"{quoted(key + '=')} {value}"

    return rules.add(f'{quoted(name + "(")} {_arguments(schema, argument, separator=quoted(", "))} ")"')


def _plain_value(rules: Rules, root: Any, part: Any, closing: str) -> str:
    """Lark for a value as text up to `closing`, and that: a string without quotes, anything else as JSON."""
    resolved = resolve(part, root)
    end = _end(rules, closing)
    choices = choices_of(resolved)
    if choices is not None:
        texts = (value if isinstance(value, str) else _dumped(value) for value in choices)
        return f"({' | '.join(map(quoted, texts))}) {end}"
    if is_text(resolved):
        return _text(rules, resolved, closing)
    return f"{_json(root, part)} {end}"


def _json(root: Any, part: Any) -> str:
    """Lark for JSON of a part of the schema `root`, whose definitions it may name."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return json_rule({**shared, **part} if isinstance(part, Mapping) else part)


# Texts


BOUNDS = frozenset(("minLength", "maxLength", "pattern"))


def is_text(schema: Any) -> bool:
    """True for a schema of texts, which need no quotes in these formats."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and choices_of(schema) is None


def choices_of(schema: Any) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _text(rules: Rules, schema: Any, closing: str) -> str:
    """Lark for a text within its schema's bounds, up to `closing`, and that."""
    token = rules.mark(closing)
    expressions = [_length(schema), *_pattern(schema)]
    if expressions == [ANYTHING]:
        return rules.text_until(closing)
    if is_token(token):
        return f"{_joined(rules, expressions)} {token}"
    end = escaped(closing)
    bounded = [f"/{expression}{end}/" for expression in expressions]
    return rules.terminal(f"{' & '.join(bounded)} & ~/{ANYTHING}{end}(?s:.+)/")


def _joined(rules: Rules, expressions: Sequence[str]) -> str:
    """Lark for a text that all of these expressions match."""
    if len(expressions) == 1:
        return f"/{expressions[0]}/"
    return rules.terminal(" & ".join(f"/{expression}/" for expression in expressions))


def _length(schema: Mapping[str, Any]) -> str:
    """Expression of texts with as many characters as a schema allows."""
    least, most = (_number(schema.get(key)) for key in ("minLength", "maxLength"))
    if least is None and most is None:
        return ANYTHING
    return f"(?s:.{{{least or 0},{'' if most is None else most}}})"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _pattern(schema: Mapping[str, Any]) -> list[str]:
    """Expression of the texts in which a schema's pattern is resolved; none for one that the compiler does not know."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or LOOKING.search(pattern):
        return []
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in inner and not inner.startswith("("):
        return []  # an anchor belongs to one of the alternatives
    whole = f"{'' if begins else ANYTHING}(?:{inner}){'' if ends else ANYTHING}"
    try:
        return [regex(whole)[1:-1]]
    except (ValueError, RequestError):
        return []


def _end(rules: Rules, closing: str) -> str:
    token = rules.mark(closing)
    return token if is_token(token) else quoted(closing)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Gemma's values


def function_gemma(rules: Rules, name: str, schema: Any) -> str:
    return _gemma(rules, name, schema, "<start_function_call>", text_formats.GEMMA_QUOTES[0])


def gemma4(rules: Rules, name: str, schema: Any) -> str:
    return _gemma(rules, name, schema, "<|tool_call>", text_formats.GEMMA_QUOTES[1])


def _gemma(rules: Rules, name: str, schema: Any, begin: str, quote: str) -> str:
    values = GemmaValues(rules, schema, quote)
    end = rules.mark(text_formats.GEMMA_CALLS[begin])
    arguments = values.members(schema)
    return rules.add(f'{rules.mark(begin)} {quoted(f"call:{name}" + "{")} {arguments} "}}" {end}')


class GemmaValues:
    """Lark of values in Gemma's form: texts between quotes that are marks, keys without quotes.

    `root` is the schema whose definitions the others name.
    """

    def __init__(self, rules: Rules, root: Any, quote: str) -> None:
        self._rules, self._root, self._quote = rules, root, quote
        self._any: str | None = None
        self._named: dict[str, str] = {}  # rules of definitions, which may contain themselves

    def members(self, schema: Mapping[str, Any]) -> str:
        """Lark for the members of an object."""
        return _arguments(schema, lambda key, part: f"{quoted(key + ':')} {self.value(part)}", separator='","')

    def value(self, schema: Any) -> str:
        """Lark for a value of a schema. Raises RequestError for a type that there is not."""
        if not isinstance(schema, Mapping):
            return self._any_value()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._referred(reference, schema)
        choices = choices_of(schema)
        if choices is not None:
            return f"({' | '.join(map(self._literal, choices))})"
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return f"({' | '.join(map(self.value, schema[key]))})"
        types = schema.get("type")
        if isinstance(types, list) and types:
            return f"({' | '.join(self.value({**schema, 'type': kind}) for kind in types)})"
        return self._typed(types, schema)

    def _typed(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind is None:
            return self._any_value()
        if not isinstance(kind, str) or kind not in TYPES:
            raise RequestError(f"Invalid type: {kind!r:.80}", param="tools", code="invalid-grammar")
        if kind == "string":
            return f"{self._rules.mark(self._quote)} {_text(self._rules, schema, self._quote)}"
        if kind == "object" and isinstance(schema.get("properties"), Mapping) and schema["properties"]:
            return f'("{{" {self.members(schema)} "}}")'
        if kind == "object":
            return self._any_object()
        if kind == "array":
            return self._array(schema)
        return json_rule(schema)

    def _referred(self, reference: str, schema: Mapping[str, Any]) -> str:
        if reference not in self._named:
            resolved = resolve(schema, self._root)
            if not isinstance(resolved, Mapping) or "$ref" in resolved:
                raise RequestError(f"unknown reference: {reference!r:.80}", param="tools", code="invalid-grammar")
            self._named[reference] = self._rules.reserve()
            self._rules.fill(self._named[reference], self.value(resolved))
        return self._named[reference]

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items"))
        least, most = _number(schema.get("minItems")) or 0, _number(schema.get("maxItems"))
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _literal(self, value: Any) -> str:
        """Lark of one value."""
        if isinstance(value, str):
            mark = self._rules.mark(self._quote)
            return f"{mark} {quoted(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, dict):
            members = (f"{quoted(f'{key}:')} {self._literal(item)}" for key, item in value.items())
            return f'("{{" {_COMMA.join(members)} "}}")'
        if isinstance(value, list):
            return f'("[" {_COMMA.join(map(self._literal, value))} "]")'
        return quoted(_dumped(value))

    def _any_object(self) -> str:
        value = self._any_value()
        member = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value}'
        return f'("{{" ({member} ("," {member})*)? "}}")'

    def _any_value(self) -> str:
        """Rule for a value of any type."""
        if self._any is None:
            self._any = self._rules.reserve()
            text = f"{self._rules.mark(self._quote)} {_text(self._rules, {}, self._quote)}"
            numbers = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/"
            values = f'"[" ({self._any} ("," {self._any})*)? "]" | {self._any_object()}'
            self._rules.fill(self._any, f'{text} | {numbers} | "true" | "false" | "null" | {values}')
        return self._any


# Arguments


def _arguments(schema: Any, argument: Argument, separator: str = "") -> str:
    """Lark for the arguments of a schema in its order: the required ones, and each of the others or not."""
    properties = schema.get("properties")
    required = schema.get("required")
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    parts = properties if isinstance(properties, Mapping) else {}
    items = {key: f"({argument(key, part)})" for key, part in parts.items()}
    if not separator:
        return " ".join(item if key in needed else f"{item}?" for key, item in items.items())
    must = [item for key, item in items.items() if key in needed]
    may = [item for key, item in items.items() if key not in needed]
    return _separated(must, may, separator)


def _separated(must: Sequence[str], may: Sequence[str], separator: str) -> str:
    """Lark for the items `must`, then each of `may` or not: each of those behind the first brings its separator."""
    if must:
        return f" {separator} ".join(must) + _optional(may, separator)
    if not may:
        return ""
    first = [item + _optional(may[at + 1 :], separator) for at, item in enumerate(may)]
    return "(" + " | ".join(first) + ")?"


def _optional(items: Sequence[str], separator: str) -> str:
    return "".join(f" ({separator} {item})?" for item in items)
