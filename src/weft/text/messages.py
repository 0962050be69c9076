"""Check the messages of a conversation and convert them to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalize_messages(messages: object, *, developer: bool) -> list[dict[str, Any]]:
    """Copies of `messages` with their content as one text: parts of type text are joined by line breaks.

    An assistant's content may be missing if it has tool_calls, whose arguments become objects. `developer`: the
    template knows the role "developer"; else its messages become system messages, joined to a system message directly
    before them. Raises RequestError (param "messages") for anything that is not a message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise _wrong("messages must be a list of at least one message", code="messages-not-list")
    normalized: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        copy = _message(message, f"messages[{index}]")
        if copy["role"] == "developer" and not developer:
            copy["role"] = "system"
            if normalized and normalized[-1]["role"] == "system":
                normalized[-1]["content"] += "\n\n" + copy["content"]
                continue
        normalized.append(copy)
    return normalized


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(
            f"{name} is a {type(message).__name__}; a message is an object with role and content",
            code="message-not-object",
        )
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{name} has the role {role!r:.80}; known roles: {', '.join(ROLES)}", code="unknown-role")
    content = message.get("content")
    # Clients send back the fields that they got, including null ones; templates test only for presence.
    copy = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    calls = message.get("tool_calls")
    if calls:
        copy["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    # None stays None: by it templates tell a tool call from a text.
    only_calls = role == "assistant" and "tool_calls" in copy and content is None
    copy["content"] = None if only_calls else _text(content, f"{name}.content")
    return copy


def _text(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(f"{name} must be a text or a list of text parts, not {content!r:.80}", code="content-not-text")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text":
            raise _wrong(
                f"{name}[{index}] is of type {kind!r:.80}; this model takes parts of type 'text' only",
                code="content-part-not-text",
            )
        if not isinstance(text, str):
            raise _wrong(f"{name}[{index}].text must be a text, not {text!r:.80}", code="text-of-part-not-text")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, name: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments decoded: clients send JSON in a text, and templates encode it themselves."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise _wrong(f"{name} must be a list of objects", code="tool-calls-not-objects")
    return [_call(call, f"{name}[{index}].function.arguments") for index, call in enumerate(calls)]


def _call(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise _wrong(f"{name} is no valid JSON: {error}", code="tool-arguments-not-json") from error
    except RecursionError:
        raise _wrong(f"{name} is not usable JSON: too deeply nested", code="json-nested-too-deeply") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong(message: str, *, code: str) -> RequestError:
    return RequestError(message, param="messages", code=code)
