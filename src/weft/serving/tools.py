"""The tools of a chat request: checks of `tools` and `tool_choice`, and how a model learns of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import RequestError
from weft.serving.openai_types import ChatRequest
from weft.serving.parsers import tool_formats
from weft.serving.parsers.choose import ToolFormat
from weft.text.call_forms import CALL_FORMS, HERMES, MISTRAL_NAMED, CallForm
from weft.text.limits import LIMITS

Choice = Literal["auto", "required", "none"]

INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{how}
{example}"""
HOW_IN_JSON = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    "tags:"
)
HOW = "To call a function, write exactly this, with its name and its arguments:"


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call, as OpenAI's objects; `named` is the one that it must call."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Choice = "auto"
    named: str | None = None

    @property
    def forced(self) -> Sequence[Mapping[str, Any]]:
        """The tools of which the answer must call one; none if it may be a text."""
        if self.named is not None:
            return [tool for tool in self.tools if tool["function"]["name"] == self.named]
        return self.tools if self.choice == "required" else ()


def read_tools(body: ChatRequest) -> ToolUse:
    """Check a request's tools. Raises RequestError, naming the field."""
    tools, choice = body.tools or [], body.tool_choice
    if len(tools) > LIMITS.tools:
        raise RequestError(
            f"tools has {len(tools):,} items; the limit is {LIMITS.tools}", param="tools", code="too-many-items"
        )
    names = [_tool_name(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice is None or choice == "auto":
        return ToolUse(tools)
    if choice == "none":
        return ToolUse()
    if choice == "required":
        return ToolUse(_some(tools), "required")
    if isinstance(choice, str):
        raise _wrong_choice(f"tool_choice is {choice!r:.80}; it is auto, required, none or an object that names a tool")
    name = _chosen_name(choice)
    if name not in names:
        raise _wrong_choice(f"tool_choice names {name!r:.80}, which is not in tools ({', '.join(names)[:200]})")
    return ToolUse(tools, "required", name)


def _some(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not tools:
        raise _wrong_choice("tool_choice needs tools; give at least one, or leave tool_choice out")
    return tools


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _wrong_choice('tool_choice as an object is {"type": "function", "function": {"name": NAME}}')
    return name


def _tool_name(tool: Mapping[str, Any], place: str) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise _wrong_tool(
            f'{place} must be {{"type": "function", "function": {{...}}}}; its type is {tool.get("type")!r:.80}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > LIMITS.tool_name or not name.isprintable():
        raise _wrong_tool(
            f"{place}.function.name must be a text of 1 to {LIMITS.tool_name} characters, not {name!r:.80}"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong_tool(f"{place}.function.parameters must be a JSON schema, an object, not {parameters!r:.80}")
    return name


def _wrong_tool(message: str) -> RequestError:
    return RequestError(message, param="tools", code="invalid-tool")


def _wrong_choice(message: str) -> RequestError:
    return RequestError(message, param="tool_choice", code="invalid-tool-choice")


def call_form(tools: ToolFormat) -> CallForm:
    """Return how calls that the parser `tools` reads stand in a text."""
    return MISTRAL_NAMED if tool_formats.MISTRAL_ARGS in tools.signs else CALL_FORMS.get(tools.name, HERMES)


def add_tools_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallForm
) -> list[Mapping[str, Any]]:
    """Messages for a template that knows no tools: the system message lists them and asks for calls of this form."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(tools=listed, how=HOW_IN_JSON if form is HERMES else HOW, example=form.example())
    first = messages[0] if messages else None
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        return [{**first, "content": [*content, {"type": "text", "text": f"\n{text}"}]}, *messages[1:]]
    return [{**first, "content": f"{content}\n\n{text}" if isinstance(content, str) else content}, *messages[1:]]
