"""Check the messages of a conversation and convert them to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles of messages that no side of the conversation says
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of a message's reasoning; templates read the first two
# Types of a content's parts that are text, and the field that has it. Some clients take them from /v1/responses.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHTS = ("thinking", "reasoning")  # types of a content's parts that are reasoning, in a field of the same name
INVALID = "invalid_arguments"  # name of the one argument of a call whose arguments are no object

SEPARATOR = "\n\n"  # between texts that become one message

Message = dict[str, Any]


def normalize_messages(messages: object, *, developer: bool) -> list[Message]:
    """Copies of `messages` with their content as one text: parts of type text are joined by line breaks.

    An assistant's content is None if it has only tool_calls, whose arguments become objects, and a tool's result may be
    anything. Reasoning gets all the names that templates read. `developer`: the template knows the role "developer";
    else its messages become system messages, joined to a system message directly before them. Raises RequestError
    (param "messages") for anything that is not a message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise _wrong("messages must be a list of at least one message", code="messages-not-list")
    normalized: list[Message] = []
    joined: dict[int, list[str]] = {}  # further texts of a message, by its index
    for index, message in enumerate(messages):
        copy = _message(message, f"messages[{index}]")
        if copy["role"] == "developer" and not developer:
            copy["role"] = "system"
            if normalized and normalized[-1]["role"] == "system":
                joined.setdefault(len(normalized) - 1, []).append(copy["content"])
                continue
        normalized.append(copy)
    for index, texts in joined.items():
        normalized[index]["content"] = SEPARATOR.join([normalized[index]["content"], *texts])
    return normalized


def _message(message: object, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(
            f"{name} is a {type(message).__name__}; a message is an object with role and content",
            code="message-not-object",
        )
    role = message.get("role")
    role = "tool" if role == "function" else role  # the former name
    if role not in ROLES:
        raise _wrong(f"{name} has the role {role!r:.80}; known roles: {', '.join(ROLES)}", code="unknown-role")
    content = message.get("content")
    # Clients send back the fields that they got, including null ones; templates test only for presence.
    copy = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    if role == "tool":
        return {**copy, "role": role, "content": result_text(content)}
    if role != "assistant":
        return {**copy, "content": _text(content, f"{name}.content")}
    calls = message.get("tool_calls") or _former_calls(copy)
    content = content or copy.pop("refusal", None) or content
    if calls:
        copy["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    if isinstance(content, list | tuple):
        content = _part_thoughts(content, copy)
    _name_reasoning(copy)
    # None stays None: by it templates tell a tool call from a text.
    if content is not None:
        copy["content"] = _text(content, f"{name}.content")
    else:
        copy["content"] = None if calls else ""
    return copy


def _former_calls(message: Message) -> list[Any]:
    """Take the call of a message in the API's former form, before there were tools."""
    call = message.pop("function_call", None)
    return [{"type": "function", "function": call}] if call else []


def _part_thoughts(parts: Sequence[Any], message: Message) -> list[Any]:
    """Take the reasoning out of a content's parts, as the message's own; returns the other parts."""
    thoughts = [part for part in parts if isinstance(part, Mapping) and part.get("type") in THOUGHTS]
    text = "\n".join(result_text(part.get(part["type"])) for part in thoughts)
    if text:
        message.setdefault("reasoning_content", text)
    return [part for part in parts if part not in thoughts]


def _name_reasoning(message: Message) -> None:
    """Give the reasoning, which may have parts, the names that templates read. An empty one is left out."""
    for field in REASONING:
        if field in message and not isinstance(message[field], str):
            message[field] = result_text(message[field] or None)
        if message.get(field) == "":
            del message[field]
    reasoning = next((message[field] for field in REASONING if field in message), None)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
        message.setdefault("thinking", reasoning)


def _text(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(f"{name} must be a text or a list of text parts, not {content!r:.80}", code="content-not-text")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(kind, str) or kind not in TEXTS:
            raise _wrong(
                f"{name}[{index}] is of type {kind!r:.80}; this model takes parts of type 'text' only",
                code="content-part-not-text",
            )
        field = TEXTS[kind]
        text = part.get(field)
        if not isinstance(text, str):
            raise _wrong(f"{name}[{index}].{field} must be a text, not {text!r:.80}", code="text-of-part-not-text")
        texts.append(text)
    return "\n".join(texts)


def result_text(content: object) -> str:
    """Return a tool's result as text: parts that are none are named, and what has no parts becomes JSON.

    A result is never refused: the conversation would keep it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return "\n".join(map(_part_text, content))
    return json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: Mapping[str, Any]) -> str:
    """The text of a part: its own, a document's, or the texts within a search result."""
    if isinstance(text := part.get("text"), str):
        return text
    source, inner = part.get("source"), part.get("content")
    texts: list[Any] = []
    if isinstance(source, Mapping) and source.get("type") == "text":
        texts.append(source.get("data"))
    if isinstance(inner, list | tuple):
        texts += [one.get("text") for one in inner if isinstance(one, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str)) or name_part(part["type"])


def name_part(kind: object) -> str:
    """Return the text that stands for a part of a result that this model cannot read, such as an image."""
    plain = str(kind).removeprefix("input_").removesuffix("_url")
    return f"[{plain:.40}: this model reads text only]"


def _calls(calls: object, name: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments decoded: clients send JSON in a text, and templates encode it themselves."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise _wrong(f"{name} must be a list of objects", code="tool-calls-not-objects")
    return [_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]


def _call(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"{name} must be an object with a function that has a name", code="tool-calls-not-objects")
    outer = {key: value for key, value in call.items() if value is not None and key not in ("name", "arguments")}
    arguments = _arguments(function.get("arguments"))
    if function is call:
        return {"type": "function", **outer, "function": {"name": call["name"], "arguments": arguments}}
    return {**outer, "function": {**function, "arguments": arguments}}


def _arguments(given: object) -> dict[str, Any]:
    """A call's arguments as an object. A model writes them, so they can be anything, such as JSON that is cut off."""
    try:
        value = json.loads(given) if isinstance(given, str) and given else given
    except (ValueError, RecursionError):
        value = given
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None or value == "" else {INVALID: value}


def _wrong(message: str, *, code: str) -> RequestError:
    return RequestError(message, param="messages", code=code)
