"""Grammars of tool calls, one per family, for answers that must call a tool.

Each function returns a Lark rule for a call of a tool; `Calls` says how calls follow each other. Families whose
arguments are text between marks are in `text_grammars`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.api.parsers import harmony, tool_formats
from weft.api.parsers.gemma_grammars import function_gemma, gemma4
from weft.api.parsers.rules import Rules, Tool, json_rule, schema_of
from weft.api.parsers.text_grammars import glm45, pythonic_call, qwen3_coder
from weft.engine.structured.grammar import quoted

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
