"""Grammars of tool calls, one for each family: what an answer must be that has to call a tool.

Each function returns a Lark rule for one call of one tool; `Calls` says how calls follow each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.serving.parsers import harmony, text_formats, tool_formats
from weft.structured.grammar import quoted, with_options

Tool = Mapping[str, Any]
Mark = Callable[[str], str]  # Lark of a mark: its token, if it is a special one


class Rules:
    """Rules of a grammar, with names that are not taken yet. `mark` gives the Lark of a special token's text."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.lines: list[str] = []

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"rule{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def text(self, *parts: str) -> str:
        """Lark of several texts in a row."""
        return " ".join(quoted(part) for part in parts if part)


CallRule = Callable[[Rules, str, Any], str]  # of a tool's name and its parameters' schema


@dataclass(frozen=True)
class Calls:
    """The grammar of a family's calls. `before`, `between` and `after` surround them; texts in `marks` are marks."""

    call: CallRule
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    marks: frozenset[str] = field(default_factory=frozenset)

    def rule(self, rules: Rules, tools: Iterable[Tool], *, several: bool) -> str:
        """Add the rules of an answer that calls one of `tools`, or `several`; returns the name of the whole."""
        calls = [self.call(rules, tool["function"]["name"], schema_of(tool)) for tool in tools]
        call = rules.add(" | ".join(calls))
        more = f" ({self._row(rules, self.between)} {call})*" if several else ""
        return rules.add(f"{self._row(rules, self.before)} {call}{more} {self._row(rules, self.after)}")

    def _row(self, rules: Rules, parts: Sequence[str]) -> str:
        return " ".join(rules.mark(part) if part in self.marks else quoted(part) for part in parts)


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments."""
    schema = tool["function"].get("parameters") or {}
    return {"type": "object", **schema} if "type" not in schema else schema


def json_rule(schema: Any) -> str:
    """Lark for JSON of a schema. Keywords that the compiler does not know are left out of account."""
    return "%json " + json.dumps(with_options(schema, lenient=True), ensure_ascii=False)


def _object(rules: Rules, name: str, schema: Any, key: str) -> str:
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f"{quoted(head)} {json_rule(schema)} {quoted('}')}"


def hermes(rules: Rules, name: str, schema: Any) -> str:
    begin, end = rules.mark("<tool_call>"), rules.mark("</tool_call>")
    return rules.add(f'{begin} "\\n" {_object(rules, name, schema, "arguments")} "\\n" {end}')


def llama3_json(rules: Rules, name: str, schema: Any) -> str:
    return rules.add(_object(rules, name, schema, "parameters"))


def mistral(rules: Rules, name: str, schema: Any) -> str:
    return rules.add(_object(rules, name, schema, "arguments"))


def mistral_named(rules: Rules, name: str, schema: Any) -> str:
    calls, args = rules.mark(tool_formats.MISTRAL_CALLS), rules.mark(tool_formats.MISTRAL_ARGS)
    return rules.add(f"{calls} {quoted(name)} {args} {json_rule(schema)}")


def deepseek_v3(rules: Rules, name: str, schema: Any) -> str:
    begin, sep, end = _deepseek_marks(rules)
    head, tail = quoted(f"{name}\n```json\n"), quoted("\n```")
    return rules.add(f'{begin} "function" {sep} {head} {json_rule(schema)} {tail} {end}')


def deepseek_v31(rules: Rules, name: str, schema: Any) -> str:
    begin, sep, end = _deepseek_marks(rules)
    return rules.add(f"{begin} {quoted(name)} {sep} {json_rule(schema)} {end}")


def _deepseek_marks(rules: Rules) -> tuple[str, str, str]:
    marks = (tool_formats.DEEPSEEK_CALL, tool_formats.DEEPSEEK_SEP, tool_formats.DEEPSEEK_CALL_END)
    begin, sep, end = map(rules.mark, marks)
    return begin, sep, end


def kimi_k2(rules: Rules, name: str, schema: Any) -> str:
    marks = (tool_formats.KIMI_CALL, tool_formats.KIMI_ARGS, tool_formats.KIMI_CALL_END)
    begin, args, end = map(rules.mark, marks)
    return rules.add(f"{begin} {quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {args} {json_rule(schema)} {end}")


def openai(rules: Rules, name: str, schema: Any) -> str:
    channel, constrain, message = map(rules.mark, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE))
    head = quoted(f"commentary to=functions.{name} ")
    return rules.add(f'{channel} {head} {constrain} "json" {message} {json_rule(schema)} {rules.mark(harmony.CALL)}')


# Formats whose arguments are text


def qwen3_coder(rules: Rules, name: str, schema: Any) -> str:
    begin, end = rules.mark("<tool_call>"), rules.mark("</tool_call>")
    closing = f"\n{text_formats.PARAMETER_END}\n"

    def argument(key: str, part: Any) -> str:
        value = _text(rules, closing) if is_text(part) else f"{json_rule(part)} {quoted(closing)}"
        return f"{quoted(f'<parameter={key}>' + chr(10))} {value}"

    arguments = _arguments(rules, schema, argument)
    return rules.add(f'{begin} {quoted(f"{chr(10)}<function={name}>{chr(10)}")} {arguments} "</function>\\n" {end}')


def glm45(rules: Rules, name: str, schema: Any) -> str:
    begin, key_begin, key_end = map(rules.mark, ("<tool_call>", text_formats.KEY, text_formats.KEY_END))
    value_begin, value_end = map(rules.mark, (text_formats.VALUE, text_formats.VALUE_END))

    def argument(key: str, part: Any) -> str:
        value = _marked_text(rules, text_formats.VALUE_END) if is_text(part) else f"{json_rule(part)} {value_end}"
        return f'{key_begin} {quoted(key)} {key_end} "\\n" {value_begin} {value} "\\n"'

    arguments = _arguments(rules, schema, argument)
    return rules.add(f"{begin} {quoted(name + chr(10))} {arguments} {rules.mark('</tool_call>')}")


def function_gemma(rules: Rules, name: str, schema: Any) -> str:
    return _gemma(rules, name, schema, "<start_function_call>", text_formats.GEMMA_QUOTES[0])


def gemma4(rules: Rules, name: str, schema: Any) -> str:
    return _gemma(rules, name, schema, "<|tool_call>", text_formats.GEMMA_QUOTES[1])


def _gemma(rules: Rules, name: str, schema: Any, begin: str, quote: str) -> str:
    value = _gemma_values(rules, quote)

    def argument(key: str, part: Any) -> str:
        return f"{quoted(key + ':')} {_gemma_value(rules, part, value, quote)}"

    arguments = _arguments(rules, schema, argument, separator='","')
    end = rules.mark(text_formats.GEMMA_CALLS[begin])
    return rules.add(f'{rules.mark(begin)} {quoted(f"call:{name}" + "{")} {arguments} "}}" {end}')


def _gemma_values(rules: Rules, quote: str) -> str:
    """Rule for a value of any type."""
    text = f"{rules.mark(quote)} {_marked_text(rules, quote)}"
    at = len(rules.lines)
    value = f"rule{at}"
    member = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value}'
    return rules.add(
        f'{text} | /-?[0-9]{{1,15}}(\\.[0-9]{{1,15}})?/ | "true" | "false" | "null"'
        f' | "[" ({value} ("," {value})*)? "]" | "{{" ({member} ("," {member})*)? "}}"'
    )


def _gemma_value(rules: Rules, schema: Any, any_value: str, quote: str) -> str:
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(values, list) and values and all(isinstance(item, str) for item in values):
        mark = rules.mark(quote)
        return f"{mark} ({' | '.join(map(quoted, values))}) {mark}"
    if is_text(schema):
        return f"{rules.mark(quote)} {_marked_text(rules, quote)}"
    types = schema.get("type") if isinstance(schema, Mapping) else None
    return json_rule(schema) if types in ("integer", "number", "boolean") else any_value


def pythonic_call(rules: Rules, name: str, schema: Any) -> str:
    def argument(key: str, part: Any) -> str:
        boolean = isinstance(part, Mapping) and part.get("type") == "boolean"
        return f"{quoted(key + '=')} " + ('("True" | "False")' if boolean else json_rule(part))

    return rules.add(f'{quoted(name + "(")} {_arguments(rules, schema, argument, separator=quoted(", "))} ")"')


def is_text(schema: Any) -> bool:
    """True for a schema of any text, which needs no quotes in these formats."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and not {"enum", "const"} & schema.keys()


def _text(rules: Rules, end: str) -> str:
    """Rule for any text up to `end`, and that."""
    return rules.add(f"/(?s:.*){_escaped(end)}/", "[lazy]")


def _marked_text(rules: Rules, mark: str) -> str:
    """Lark for any text up to a mark, and that."""
    token = rules.mark(mark)
    return f"/(?s:.*)/ {token}" if token.startswith("<[") else _text(rules, mark)


def _escaped(text: str) -> str:
    special = "\\/.^$|?*+()[]{}"
    return "".join(f"\\{letter}" if letter in special else "\\n" if letter == "\n" else letter for letter in text)


def _arguments(rules: Rules, schema: Any, argument: Callable[[str, Any], str], separator: str = "") -> str:
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


HERMES = Calls(hermes, between=("\n",))
QWEN3_CODER = Calls(qwen3_coder, between=("\n",))
GLM45 = Calls(glm45, between=("\n",))
LLAMA3_JSON = Calls(llama3_json, between=("; ",))
PYTHONIC = Calls(pythonic_call, before=("[",), between=(", ",), after=("]",))
MISTRAL = Calls(mistral, (tool_formats.MISTRAL_CALLS, "["), (", ",), ("]",), frozenset({tool_formats.MISTRAL_CALLS}))
MISTRAL_NAMED = Calls(mistral_named)
DEEPSEEK_MARKS = frozenset(tool_formats.DEEPSEEK_MARKS)
DEEPSEEK_V3 = Calls(
    deepseek_v3, (tool_formats.DEEPSEEK_CALLS,), ("\n",), (tool_formats.DEEPSEEK_CALLS_END,), DEEPSEEK_MARKS
)
DEEPSEEK_V31 = Calls(
    deepseek_v31, (tool_formats.DEEPSEEK_CALLS,), (), (tool_formats.DEEPSEEK_CALLS_END,), DEEPSEEK_MARKS
)
KIMI_K2 = Calls(
    kimi_k2, (tool_formats.KIMI_CALLS,), (), (tool_formats.KIMI_CALLS_END,), frozenset(tool_formats.KIMI_MARKS)
)
OPENAI = Calls(openai, between=(harmony.START, "assistant"), marks=frozenset(harmony.MARKS))
FUNCTION_GEMMA = Calls(function_gemma)
GEMMA4 = Calls(gemma4)
