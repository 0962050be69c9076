"""CallForm: how calls of tools stand in a text, for templates that do not write them themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

RESULT = "<tool_response>\n{text}\n</tool_response>"


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """A family's form of calls: `call` for each one, between `before`, `between` and `after`.

    `call` has the places {name} or {quoted}, which is the name in JSON, {number} and {arguments}. The arguments are a
    JSON object, unless `argument` has the places {key} and {value} for each of them, with `separator` between. `quote`
    then stands around a value that is a text; None makes it JSON.
    """

    call: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    argument: str = ""
    separator: str = ""
    quote: str | None = ""

    def write_calls(self, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the calls, each a name and its arguments, as text."""
        texts = [
            self._call(number, name, json.dumps(name, ensure_ascii=False), self._arguments(arguments))
            for number, (name, arguments) in enumerate(calls)
        ]
        return f"{self.before}{self.between.join(texts)}{self.after}"

    def example(self) -> str:
        """Return a call with names in place of its parts, as instructions show it."""
        arguments = self._arguments({"<argument-name>": "<argument-value>"}) if self.argument else "<args-json-object>"
        return f"{self.before}{self._call(0, '<function-name>', '<function-name>', arguments)}{self.after}"

    def _call(self, number: int, name: str, quoted: str, arguments: str) -> str:
        head = self.call.replace("{number}", str(number)).replace("{name}", name).replace("{quoted}", quoted)
        return head.replace("{arguments}", arguments)

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if not self.argument:
            return json.dumps(arguments, ensure_ascii=False)
        return self.separator.join(self._argument(key, value) for key, value in arguments.items())

    def _argument(self, key: str, value: Any) -> str:
        if isinstance(value, str) and self.quote is not None:
            text = f"{self.quote}{value}{self.quote}"
        else:
            text = json.dumps(value, ensure_ascii=False)
        return self.argument.replace("{key}", key).replace("{value}", text)


HERMES = CallForm(call='<tool_call>\n{"name": {quoted}, "arguments": {arguments}}\n</tool_call>')
MISTRAL_NAMED = CallForm(call="[TOOL_CALLS]{name}[ARGS]{arguments}", between="")
# By the names of parsers, which read what is written here.
CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": HERMES,
    "llama3_json": CallForm(call='{"name": {quoted}, "parameters": {arguments}}', between="; "),
    "mistral": CallForm(
        call='{"name": {quoted}, "arguments": {arguments}}', before="[TOOL_CALLS][", between=", ", after="]"
    ),
    "deepseek_v3": CallForm(
        before="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallForm(
        before="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        between="",
        after="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": CallForm(
        before="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        between="",
        after="<|tool_calls_section_end|>",
    ),
    "openai": CallForm(
        call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        between="<|start|>assistant",
    ),
    "qwen3_coder": CallForm(
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "glm45": CallForm(
        call="<tool_call>{name}\n{arguments}</tool_call>",
        argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "pythonic": CallForm(
        before="[",
        call="{name}({arguments})",
        between=", ",
        after="]",
        argument="{key}={value}",
        separator=", ",
        quote=None,
    ),
    "gemma": CallForm(
        call="<start_function_call>call:{name}{{arguments}}<end_function_call>",
        between="",
        argument="{key}:{value}",
        separator=",",
        quote="<escape>",
    ),
}


def write_result(text: str) -> str:
    """Return the result of a call as a user's text."""
    return RESULT.replace("{text}", text)
