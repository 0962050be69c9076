"""The kinds of tools that clients send, as functions that models call, and the calls in the clients' form.

A client runs functions, custom tools (whose input is a text), tools of a namespace, and a local shell. Other kinds run
on a provider's own servers. They are left out, and the model answers without them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.api.parsers.lenient_json import repaired
from weft.errors import RequestError

INPUT = "input"  # the parameter of a function that stands for a custom tool
SHELL = "local_shell"

SHELL_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments"},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


@dataclass(frozen=True)
class ToolForm:
    """The client's form of a tool that the model knows as a function, possibly under another name."""

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class ClientTools:
    """Tools as OpenAI's functions; and by the model's name, the forms of tools that are no functions for the client."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, ToolForm] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # kinds that are not supported here
    _model_names: dict[tuple[str, str | None], str] = field(default_factory=dict)  # by the client's, and its namespace

    def add(self, function: Mapping[str, Any], form: ToolForm | None = None) -> None:
        self.functions.append({"type": "function", "function": dict(function)})
        if form is not None:
            self.forms[function["name"]] = form
            self._model_names.setdefault((form.name, form.namespace), function["name"])

    def model_name(self, name: str, namespace: str | None) -> str:
        """Return the name by which the model knows a client's tool."""
        return self._model_names.get((name, namespace or None), name)


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> ClientTools:
    """Return the tools of a chat request, each {"type": KIND, KIND: {...}}. Raises RequestError."""
    read = ClientTools()
    for number, tool in enumerate(tools):
        kind = _kind(tool, f"tools[{number}]")
        if kind not in ("function", "custom"):
            read.left_out.append(kind)
            continue
        given = tool.get(kind)
        if not isinstance(given, Mapping):
            raise _wrong(f'tools[{number}] must be {{"type": "{kind}", "{kind}": {{...}}}}')
        if kind == "custom":
            _add_custom(read, given, None, str(given.get("name")))
        else:
            read.functions.append(dict(tool))
    return read


def response_tools(tools: Sequence[Mapping[str, Any]]) -> ClientTools:
    """Return the tools of /v1/responses, whose fields are on the level of their type. Raises RequestError.

    The model knows a namespace's tools by their own names, with the namespace as prefix if two names are equal.
    """
    flat: list[tuple[Mapping[str, Any], str | None, str]] = []
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if _kind(tool, place) == "namespace":
            inner = tool.get("tools") or ()
            if not isinstance(inner, Sequence) or not all(isinstance(one, Mapping) for one in inner):
                raise _wrong(f"{place}.tools must be a list of tools")
            flat += [(one, str(tool.get("name")), f"{place}.tools[{at}]") for at, one in enumerate(inner)]
        else:
            flat.append((tool, None, place))
    owners = Counter(str(tool.get("name")) for tool, _, _ in flat)
    read = ClientTools()
    for tool, namespace, place in flat:
        name = str(tool.get("name"))
        known_as = name if namespace is None or owners[name] == 1 else f"{namespace.rstrip('_')}__{name}"
        match _kind(tool, place):
            case "function":
                _add_function(read, tool, namespace, known_as)
            case "custom":
                _add_custom(read, tool, namespace, known_as)
            case "local_shell":
                described = {"name": SHELL, "description": "Run a command on the user's machine."}
                read.add({**described, "parameters": SHELL_PARAMETERS}, ToolForm("local_shell", SHELL))
            case other:
                read.left_out.append(other)
    return read


def _add_function(read: ClientTools, tool: Mapping[str, Any], namespace: str | None, known_as: str) -> None:
    fields = ("description", "parameters", "strict")
    name = tool.get("name")
    function = {"name": name, **{key: tool[key] for key in fields if tool.get(key) is not None}}
    if namespace is None or not isinstance(name, str):
        read.add(function)
    else:
        read.add({**function, "name": known_as}, ToolForm("function", name, namespace))


def _add_custom(read: ClientTools, tool: Mapping[str, Any], namespace: str | None, known_as: str) -> None:
    """Add a custom tool as a function of one text. Its grammar is described to the model, but not enforced."""
    name = tool.get("name")
    if not isinstance(name, str):
        raise _wrong(f"a custom tool's name must be a text, not {name!r:.80}")
    texts = [str(tool.get("description") or ""), _describe_format(tool.get("format"))]
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": known_as, "description": "\n\n".join(filter(None, texts)), "parameters": parameters}
    read.add(function, ToolForm("custom", name, namespace))


def _describe_format(given: object) -> str:
    """Describe the form of a custom tool's input; the two APIs nest it differently."""
    if not isinstance(given, Mapping) or given.get("type") != "grammar":
        return ""
    grammar = given.get("grammar")
    own = grammar if isinstance(grammar, Mapping) else given
    return f"The input follows this grammar ({own.get('syntax')}):\n{own.get('definition')}"


def encode_input(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def call_text(form: ToolForm, arguments: str) -> str:
    """Return the arguments of a call in the client's form; for a custom tool, its input."""
    if form.kind != "custom":
        return arguments
    given: Mapping[str, Any] = json.loads(repaired(arguments) or "{}")  # a call may be cut within its input
    texts = [text for text in given.values() if isinstance(text, str)]
    text = given.get(INPUT, texts[0] if len(texts) == 1 else arguments)
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def functions_called(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a chat's messages with earlier calls of custom tools as calls of functions."""
    if not any(_has_custom_calls(message) for message in messages):
        return messages
    return [
        {**message, "tool_calls": [_function_call(call) for call in message["tool_calls"]]}
        if _has_custom_calls(message)
        else message
        for message in messages
    ]


def _has_custom_calls(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list) and any(isinstance(call, Mapping) and "custom" in call for call in calls)


def _function_call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    text = custom.get("input")
    function = {"name": custom.get("name"), "arguments": encode_input(text if isinstance(text, str) else "")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _kind(tool: object, place: str) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str):
        raise _wrong(f'{place} must be an object with a type, as in {{"type": "function", ...}}')
    return kind


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="tools", code="invalid-tool")
