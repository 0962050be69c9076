"""Grammars of tool calls whose arguments are text between marks: qwen3_coder, glm45 and pythonic.

A string is written without quotes, so that the grammar of JSON strings cannot bound it: its bounds are separate
expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.api.parsers import tagged_formats
from weft.api.parsers.alternatives import Plain, alternatives, checked, choices_of, refused
from weft.api.parsers.arguments import dumped, object_of, parts_of, row, separated
from weft.api.parsers.rules import Rules, is_token, json_rule
from weft.api.parsers.schemas import resolve, schema_types
from weft.api.parsers.text_values import text_until
from weft.engine.structured.grammar import quoted
from weft.engine.structured.references import steps_of

# Keywords by which a text is not any text.
BOUNDS = frozenset(("minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "allOf", "enum", "const", "not"))


def qwen3_coder(rules: Rules, name: str, schema: Any) -> str:
    schema = checked(schema)
    begin, end = rules.mark("<tool_call>"), rules.mark("</tool_call>")
    closing = f"\n{tagged_formats.PARAMETER_END}\n"
    parts, needed = parts_of(object_of(schema))
    items = {
        key: f"{quoted(f'<parameter={key}>' + chr(10))} {_plain_value(rules, schema, part, closing)}"
        for key, part in parts.items()
    }
    head = quoted(f"\n<function={name}>\n")
    return rules.add(f'{begin} {head} {row(items, needed)} "</function>\\n" {end}')


def glm45(rules: Rules, name: str, schema: Any) -> str:
    schema = checked(schema)
    begin, key_begin, key_end = map(rules.mark, ("<tool_call>", tagged_formats.KEY, tagged_formats.KEY_END))
    value_begin = rules.mark(tagged_formats.VALUE)
    parts, needed = parts_of(object_of(schema))
    items = {
        key: f'{key_begin} {quoted(key)} {key_end} "\\n" {value_begin} '
        f'{_plain_value(rules, schema, part, tagged_formats.VALUE_END)} "\\n"'
        for key, part in parts.items()
    }
    return rules.add(f"{begin} {quoted(name + chr(10))} {row(items, needed)} {rules.mark('</tool_call>')}")


def pythonic_call(rules: Rules, name: str, schema: Any) -> str:
    schema = checked(schema)
    parts, needed = parts_of(object_of(schema))
    items = {key: f"{quoted(key + '=')} {_python_value(rules, schema, part)}" for key, part in parts.items()}
    arguments = separated(rules, items, needed, quoted(", "))
    return rules.add(f'{quoted(name + "(")} {arguments} ")"')


def _python_value(rules: Rules, root: Any, part: Any) -> str:
    """Lark for a value in JSON's spelling, or Python's for a boolean or a text of any kind."""
    resolved = resolve(part, root)
    kind = resolved.get("type") if isinstance(resolved, Mapping) and not resolved.keys() & BOUNDS else None
    if kind == "boolean":
        return '("True" | "False")'
    value = rules.add(_json(root, part))
    return f"({value} | /'([^'\\\\\\x00-\\x1f]|\\\\['\\\\])*'/)" if kind == "string" else value


def _plain_value(rules: Rules, root: Any, part: Any, closing: str) -> str:
    """Lark for a value as text up to `closing`, and that: a string without quotes, anything else as JSON."""
    plain = alternatives(part, root)
    texts = schema_types(part, root) == {"string"}  # as the parser sees it, which reads anything else as JSON
    if texts or all(choices_of(item) is not None for item in plain):
        return f"({' | '.join(_plain_text(rules, item, closing) for item in plain)})"
    return f"{rules.add(_json(root, part))} {_end(rules, closing)}"


def _plain_text(rules: Rules, schema: Plain, closing: str) -> str:
    choices = choices_of(schema)
    if choices is None:
        return text_until(rules, schema, closing)
    mark = closing.strip()
    texts = [value if isinstance(value, str) else dumped(value) for value in choices]
    writable = [quoted(text) for text in texts if mark not in text]
    if not writable:
        raise refused(f"a value has the mark {mark} in it: {choices!r:.80}")
    return f"({' | '.join(writable)}) {_end(rules, closing)}"


def _end(rules: Rules, closing: str) -> str:
    token = rules.mark(closing)
    return token if is_token(token) else quoted(closing)


def _json(root: Any, part: Any) -> str:
    """Lark for JSON of a part of the schema `root`, with the definitions that it reaches."""
    if not isinstance(part, Mapping):
        return json_rule(part)
    reached: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [part]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
            reference = item.get("$ref")
            steps = steps_of(reference) if isinstance(reference, str) else []
            place, name, *_ = [*steps, "", ""]
            held = root.get(place) if place in ("$defs", "definitions") else None
            if isinstance(held, Mapping) and name in held and name not in reached.setdefault(place, {}):
                reached[place][name] = held[name]
                waiting.append(held[name])
    return json_rule({**reached, **part})
