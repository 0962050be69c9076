"""The tools of a chat request: checks of `tools` and `tool_choice`, and how a model learns of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import RequestError
from weft.serving.openai_types import ChatRequest
from weft.text.limits import LIMITS

Choice = Literal["auto", "required", "none"]

HERMES_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


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


def add_tools_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages for a template that knows no tools: hermes' instructions in the system message, calls as text."""
    text = HERMES_TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    plain = [_plain_message(message) for message in messages]
    if plain and plain[0].get("role") == "system" and isinstance(content := plain[0].get("content"), str):
        return [{**plain[0], "content": f"{content}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without tool calls or the role "tool", which a template without tools would not show."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_content(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return message
    texts = [text for text in [_content(message), *map(_call_text, calls)] if text]
    return {"role": "assistant", "content": "\n".join(texts)}


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _call_text(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(
            "tool_calls must be a list of objects with a function", param="messages", code="tool-calls-not-objects"
        )
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
