"""Grammars of Gemma's tool calls: texts between quotes that are marks, keys without quotes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weft.api.parsers import gemma_format
from weft.api.parsers.alternatives import Plain, alternatives, checked, choices_of, refused
from weft.api.parsers.arguments import dumped, parts_of, separated
from weft.api.parsers.json_text import MAX_DEPTH
from weft.api.parsers.rules import Rules, json_rule
from weft.api.parsers.text_values import bounds_of, text_until
from weft.engine.structured.grammar import quoted

_COMMA = ' "," '  # Lark between two parts
# Keywords that bound a number; a schema may also have keywords for values of other types.
NUMERIC = frozenset(("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
NUMBER = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/"


def function_gemma(rules: Rules, name: str, schema: Any) -> str:
    return _gemma(rules, name, schema, "<start_function_call>", gemma_format.GEMMA_QUOTES[0])


def gemma4(rules: Rules, name: str, schema: Any) -> str:
    return _gemma(rules, name, schema, "<|tool_call>", gemma_format.GEMMA_QUOTES[1])


def _gemma(rules: Rules, name: str, schema: Any, begin: str, quote: str) -> str:
    schema = checked(schema)
    end = rules.mark(gemma_format.GEMMA_CALLS[begin])
    arguments = GemmaValues(rules, schema, quote).value(schema)
    return rules.add(f"{rules.mark(begin)} {quoted(f'call:{name}')} {arguments} {end}")


class GemmaValues:
    """Lark of values in Gemma's form: each schema is one rule, which the others name.

    `root` is the schema whose definitions the others name.
    """

    def __init__(self, rules: Rules, root: Any, quote: str) -> None:
        self._rules, self._root, self._quote = rules, root, quote
        self._any: str | None = None
        self._named: dict[str, str] = {}  # rules of schemas by their JSON; schemas may contain themselves

    def value(self, schema: Any, depth: int = 0) -> str:
        """Rule for a value of a schema. Raises RequestError for a schema that no value matches."""
        if depth > MAX_DEPTH:
            raise refused(f"the schema is too deeply nested: {schema!r:.80}")
        if schema in (None, True, {}):
            return self._any_value()
        key = json.dumps(schema)
        if key not in self._named:
            self._named[key] = self._rules.reserve()
            ways = [self._plain(plain, depth + 1) for plain in alternatives(schema, self._root)]
            self._rules.fill(self._named[key], " | ".join(dict.fromkeys(ways)))
        return self._named[key]

    def _plain(self, schema: Plain, depth: int) -> str:
        choices = choices_of(schema)
        if choices is not None:
            writable = [value for value in choices if self._quote not in dumped(value)]
            if not writable:
                raise refused(f"a value has the mark {self._quote} in it: {choices!r:.80}")
            return f"({' | '.join(self._literal(value, depth) for value in writable)})"
        match schema.get("type"):
            case None if "properties" in schema:
                return self._object(schema, depth)
            case None:
                return self._any_value()
            case "string":
                return f"{self._rules.mark(self._quote)} {text_until(self._rules, schema, self._quote)}"
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
        return json_rule({key: value for key, value in schema.items() if key in NUMERIC})

    def _object(self, schema: Plain, depth: int) -> str:
        parts, needed = parts_of(schema)
        additional = schema.get("additionalProperties", True)
        if not parts and additional is not False:
            return self._map(self.value(additional, depth))
        items = {key: f"{self._key(key)} {self.value(part, depth)}" for key, part in parts.items()}
        return f'"{{" {separated(self._rules, items, needed, quoted(","))} "}}"'

    def _key(self, key: str) -> str:
        """Lark for a key and its colon: with quotes if the parser would not read it without."""
        if key == key.strip() and gemma_format.GEMMA_KEY.fullmatch(key) and "<" not in key:
            return quoted(f"{key}:")
        if self._quote in key:
            raise refused(f"a key has the mark {self._quote} in it: {key!r:.80}")
        mark = self._rules.mark(self._quote)
        return f'{mark} {quoted(key)} {mark} ":"' if key else f'{mark} {mark} ":"'

    def _array(self, schema: Plain, depth: int) -> str:
        least, most = bounds_of(schema, "minItems", "maxItems")
        if most == 0 or (schema.get("items") is False and not least):
            return '"[" "]"'
        item = self.value(schema.get("items"), depth)
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _literal(self, value: Any, depth: int) -> str:
        """Lark of one value."""
        if depth > MAX_DEPTH:
            raise refused(f"a value is too deeply nested: {value!r:.80}")
        if isinstance(value, str):
            mark = self._rules.mark(self._quote)
            return f"{mark} {quoted(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, dict):
            members = [f"{self._key(key)} {self._literal(item, depth + 1)}" for key, item in value.items()]
            return self._row("{", members, "}")
        if isinstance(value, list):
            return self._row("[", [self._literal(item, depth + 1) for item in value], "]")
        return quoted(dumped(value))

    def _row(self, begin: str, parts: Sequence[str], end: str) -> str:
        return f"({quoted(begin)} {_COMMA.join(parts)} {quoted(end)})"

    def _map(self, value: str) -> str:
        """Lark for an object of any keys, whose values follow a rule."""
        member = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value}'
        return f'("{{" ({member} ("," {member})*)? "}}")'

    def _any_value(self) -> str:
        """Rule for a value of any type."""
        if self._any is None:
            self._any = self._rules.reserve()
            text = f"{self._rules.mark(self._quote)} {text_until(self._rules, {}, self._quote)}"
            values = f'"[" ({self._any} ("," {self._any})*)? "]" | {self._map(self._any)}'
            self._rules.fill(self._any, f'{text} | {NUMBER} | "true" | "false" | "null" | {values}')
        return self._any
