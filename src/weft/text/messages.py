"""Messages of a conversation: checked, and put into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked(messages: object, *, developer: bool) -> list[dict[str, Any]]:
    """Copies with content as one text: parts of type text are joined by line breaks. An assistant's content may be
    missing where it has tool_calls, whose arguments become objects. Without a `developer` role, its messages are
    the system's, in one message with those of the system just before.

    Raises RequestError (param "messages") for anything that is no message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise _wrong("messages must be a list of at least one message")
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        one = _message(message, f"messages[{index}]")
        if one["role"] == "developer" and not developer:
            one["role"] = "system"
            if found and found[-1]["role"] == "system":
                found[-1]["content"] += "\n\n" + one["content"]
                continue
        found.append(one)
    return found


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"{name} is a {type(message).__name__}; a message is an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{name} has the role {role!r:.80}; known roles: {', '.join(ROLES)}")
    content = message.get("content")
    # Clients send back what they got, fields of no value included; templates ask whether a field is there.
    one = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    if calls := message.get("tool_calls"):
        one["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    called = role == "assistant" and "tool_calls" in one
    # None is left as it is: templates tell a call from an answer by it.
    one["content"] = None if called and content is None else _text(content, f"{name}.content")
    return one


def _text(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(f"{name} must be a text or a list of text parts, not {content!r:.80}")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text":
            raise _wrong(f"{name}[{index}] is of type {kind!r:.80}; this model takes parts of type 'text' only")
        if not isinstance(text, str):
            raise _wrong(f"{name}[{index}].text must be a text, not {text!r:.80}")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, name: str) -> list[dict[str, Any]]:
    """Clients send arguments as JSON in a text; templates write them out as JSON themselves."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise _wrong(f"{name} must be a list of objects")
    return [_call(call, f"{name}[{index}].function.arguments") for index, call in enumerate(calls)]


def _call(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise _wrong(f"{name} is no valid JSON: {error}") from error
    except RecursionError:
        raise _wrong(f"{name} is not usable JSON: too deeply nested") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="messages")
