"""The tools of a chat request: checks of `tools` and `tool_choice`, and their description for the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from weft.api.conversation.client_tools import SHELL, ClientTools, ToolForm
from weft.api.parsers import tool_formats
from weft.api.parsers.choose import ToolFormat
from weft.engine.templates.call_forms import CALL_FORMS, HERMES, MISTRAL_NAMED, CallForm
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError

T = TypeVar("T")

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
    """The tools that an answer may call, as OpenAI's objects; `named` is the tool that it must call."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Choice = "auto"
    named: str | None = None
    allowed: frozenset[str] | None = None  # names of the tools that may be called; None: of all
    forms: Mapping[str, ToolForm] = field(default_factory=dict)  # tools that are no functions for the client

    @property
    def callable(self) -> Sequence[Mapping[str, Any]]:
        """The tools that may be called. The prompt describes all tools, so that its beginning stays the same."""
        if self.allowed is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] in self.allowed]

    @property
    def forced(self) -> Sequence[Mapping[str, Any]]:
        """The tools of which the answer must call at least one; empty if it may be a text."""
        if self.named is not None:
            return [tool for tool in self.tools if tool["function"]["name"] == self.named]
        return self.callable if self.choice == "required" else ()


def read_tools(client_tools: ClientTools, choice: str | Mapping[str, Any] | None) -> ToolUse:
    """Check a request's tools and its tool_choice. Raises RequestError, naming the field."""
    tools = client_tools.functions
    _check_number("tools", tools)
    names = dict.fromkeys(_tool_name(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    use = ToolUse(tools, forms=client_tools.forms)
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    match kind:
        case None | "auto":
            return use
        case "none":
            return ToolUse()
        case "required" | "any":
            return replace(use, choice="required", tools=_some(tools, client_tools.left_out))
        case "allowed_tools" if isinstance(choice, Mapping):
            return _restricted(use, client_tools, choice, names)
        case "function" | "custom" if isinstance(choice, Mapping):
            return replace(use, choice="required", named=_check_known(_chosen_name(choice, client_tools), names))
        case str() if kind in client_tools.left_out:
            raise _wrong_choice(f"tool_choice forces {kind!r:.80}, a kind of tool that is neither run nor known here")
        case "local_shell" if SHELL in client_tools.forms:
            return replace(use, choice="required", named=SHELL)
    raise _wrong_choice(f"tool_choice is {kind!r:.80}; it is auto, required, none or an object that names a tool")


def _restricted(use: ToolUse, given: ClientTools, choice: Mapping[str, Any], names: Collection[str]) -> ToolUse:
    """Let only some tools be called, as "allowed_tools" says; chat requests have its fields one level deeper."""
    inner = choice.get("allowed_tools")
    fields = inner if isinstance(inner, Mapping) else choice
    listed, mode = fields.get("tools"), fields.get("mode", "auto")
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        raise _wrong_choice("tool_choice.tools must be a list of tools, each with its type and name")
    _check_number("tool_choice", listed)
    if mode not in ("auto", "required"):
        raise _wrong_choice(f"tool_choice.mode is {mode!r:.80}; it is auto or required")
    kept = [one for one in listed if one.get("type") not in given.left_out]
    allowed = frozenset(name for one in kept for name in _allowed_names(one, given, names))
    if mode == "required":
        _some(list(allowed), given.left_out)
    return replace(use, choice=mode, allowed=allowed)


def _check_number(param: str, tools: Sequence[object]) -> None:
    if len(tools) > LIMITS.tools:
        raise RequestError(
            f"{param} has {len(tools):,} items; the limit is {LIMITS.tools}", param=param, code="too-many-items"
        )


def _allowed_names(one: Mapping[str, Any], given: ClientTools, names: Collection[str]) -> list[str]:
    """Return the model's names of an allowed tool, or of all tools of a namespace."""
    if one.get("type") == "namespace":
        return [name for name, form in given.forms.items() if form.namespace == one.get("name")]
    return [SHELL if one.get("type") == SHELL else _check_known(_chosen_name(one, given), names)]


def _some(tools: Sequence[T], left_out: Sequence[str]) -> Sequence[T]:
    if not tools:
        there = f" ({', '.join(left_out)[:200]}: neither run nor known here, and left out)" if left_out else ""
        raise _wrong_choice(f"tool_choice needs tools; give at least one, or leave tool_choice out{there}")
    return tools


def _check_known(name: str, names: Collection[str]) -> str:
    if name not in names:
        raise _wrong_choice(f"tool_choice names {name!r:.80}, which is not in tools ({', '.join(names)[:200]})")
    return name


def _chosen_name(choice: Mapping[str, Any], given: ClientTools) -> str:
    """Return the model's name of the tool that an object names, in it or one level deeper."""
    inner = choice.get(str(choice.get("type")))
    fields = inner if isinstance(inner, Mapping) else choice
    name, namespace = fields.get("name"), fields.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        raise _wrong_choice('tool_choice as an object is {"type": "function", "function": {"name": NAME}}')
    return given.model_name(name, namespace)


def _tool_name(tool: Mapping[str, Any], place: str) -> str:
    function = tool["function"]
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
