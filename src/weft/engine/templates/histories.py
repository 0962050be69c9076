"""The history of a conversation in the form that a template shows.

Each message is changed only as far as its template needs it, whatever stands behind it: the next turn of a conversation
begins with the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from weft.engine.templates.call_forms import CallForm, write_result
from weft.engine.templates.messages import INSTRUCTIONS, SEPARATOR, Message

SHORT_ID = 9  # letters and digits of a call's id in Mistral's templates


class CallTurn(NamedTuple):
    """Properties of a message with calls that templates tell apart. `answered`: each call has its result."""

    content: bool
    reasoning: bool
    several: bool
    answered: bool


class TurnForm(NamedTuple):
    """A form in which a template shows a message with calls, and their results.

    `split`: its text and each of its calls are messages of their own. `null` is the content of a message without a
    text. `texts`: arguments are JSON texts. `short`: ids have nine letters and digits.
    """

    split: bool = False
    null: str | None = None
    texts: bool = False
    short: bool = False


class HistoryTraits(Protocol):
    """Properties of a template: the messages that it shows, and in which form."""

    @property
    def empty_text(self) -> str:
        """The content of an assistant's message without any."""

    @property
    def shows_lone_result(self) -> bool:
        """True if a tool's result needs no call before it."""

    def shows_leading(self, roles: tuple[str, ...], result_last: bool) -> bool:
        """True if messages of these roles can begin a conversation, which may end with a tool's result."""

    def shows_later(self, role: str) -> bool:
        """True if a message of this role, system or developer, can stand behind others."""

    def shows_pair(self, before: str, after: str) -> bool:
        """True if a message of the second role can follow one of the first."""

    def turn_form(self, turn: CallTurn) -> TurnForm | None:
        """Return the form of a message with calls; None if they must become text."""


class GivenTraits:
    """Traits of a template that gets its messages as they are."""

    empty_text = ""
    shows_lone_result = True

    def shows_leading(self, roles: tuple[str, ...], result_last: bool) -> bool:
        return True

    def shows_later(self, role: str) -> bool:
        return True

    def shows_pair(self, before: str, after: str) -> bool:
        return True

    def turn_form(self, turn: CallTurn) -> TurnForm | None:
        return TurnForm()


GIVEN = GivenTraits()


class PlainTraits:
    """Traits of a template that shows a user and an assistant in turn; without `known` it has no system message."""

    shows_lone_result = False

    def __init__(self, empty_text: str, known: HistoryTraits | None) -> None:
        self.empty_text = empty_text
        self._known = known

    def shows_leading(self, roles: tuple[str, ...], result_last: bool) -> bool:
        return self._known is not None and self._known.shows_leading(roles, result_last)

    def shows_later(self, role: str) -> bool:
        return False

    def shows_pair(self, before: str, after: str) -> bool:
        return False

    def turn_form(self, turn: CallTurn) -> TurnForm | None:
        return None


def list_attempts(traits: HistoryTraits) -> Iterator[HistoryTraits]:
    """The traits by which a conversation is tried, the nearest to what was sent first."""
    yield traits
    if traits is not GIVEN:
        yield PlainTraits(traits.empty_text, traits)
        yield PlainTraits(traits.empty_text, None)


def adapt_history(messages: Sequence[Message], traits: HistoryTraits, form: CallForm) -> list[Message]:
    """Return checked messages as a template with these traits shows them. Calls that become text have that `form`."""
    return _join_pairs(_shape_calls(_place_instructions(messages, traits), traits, form), traits)


def _place_instructions(messages: Sequence[Message], traits: HistoryTraits) -> list[Message]:
    """Messages with their system and developer messages where the template shows them."""
    leading = list(takewhile(_instructs, messages))
    rest = [
        _user(message["content"]) if _instructs(message) and not traits.shows_later(message["role"]) else message
        for message in messages[len(leading) :]
    ]
    result_last = _is_result(messages[-1])
    if not leading or traits.shows_leading(tuple(message["role"] for message in leading), result_last):
        return leading + rest
    text = SEPARATOR.join(message["content"] for message in leading)
    if len(leading) > 1 and traits.shows_leading(("system",), result_last):
        return [{**leading[0], "role": "system", "content": text}, *rest]
    if rest and rest[0]["role"] == "user":
        return [_joined([_user(text), rest[0]]), *rest[1:]]
    return [_user(text), *rest]


def _instructs(message: Message) -> bool:
    return message["role"] in INSTRUCTIONS


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _shape_calls(messages: Sequence[Message], traits: HistoryTraits, form: CallForm) -> list[Message]:
    """Messages with calls, their results, and an assistant's empty messages, as the template shows them."""
    made: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if message["role"] == "assistant" and "tool_calls" in message:
            first = index
            while index < len(messages) and _is_result(messages[index]):
                index += 1
            results = messages[first:index]
            made += write_turn(traits.turn_form(describe_turn(message, results)), message, results, form)
        elif _is_result(message) and not traits.shows_lone_result:
            made.append(_user(write_result(message["content"])))
        elif message["role"] == "assistant" and not message["content"]:
            made.append({**message, "content": traits.empty_text})
        else:
            made.append(message)
    return made


def _is_result(message: Message) -> bool:
    return bool(message["role"] == "tool")


def describe_turn(message: Message, results: Sequence[Message]) -> CallTurn:
    """Return the properties of a message with calls, which these results follow."""
    calls = message["tool_calls"]
    return CallTurn(
        bool(message["content"]), "reasoning_content" in message, len(calls) > 1, len(results) >= len(calls)
    )


def write_turn(turn: TurnForm | None, message: Message, results: Sequence[Message], form: CallForm) -> list[Message]:
    """Return a message with calls and their results in the form `turn`; calls that become text have the other."""
    if turn is None:
        return _write_as_text(message, results, form)
    calls = [_shape_call(call, turn, number) for number, call in enumerate(message["tool_calls"])]
    owners = _find_owners(message["tool_calls"], results)
    if turn.short:
        results = [
            {**result, "tool_call_id": calls[owner]["id"]} for result, owner in zip(results, owners, strict=True)
        ]
    content = message["content"] or None
    if not turn.split:
        return [{**message, "content": content or turn.null, "tool_calls": calls}, *results]
    made: list[Message] = [{"role": "assistant", "content": content}] if content else []
    reasoning = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    own: list[list[Message]] = [[] for _ in calls]
    for result, owner in zip(results, owners, strict=True):
        own[owner].append(result)
    for number, call in enumerate(calls):
        head = reasoning if number == 0 else {"role": "assistant"}
        made += [{**head, "content": turn.null, "tool_calls": [call]}, *own[number]]
    return made


def _write_as_text(message: Message, results: Iterable[Message], form: CallForm) -> list[Message]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    texts = [text for text in (message["content"], form.write_calls(calls)) if text]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return [{**rest, "content": "\n".join(texts)}, *(_user(write_result(result["content"])) for result in results)]


def _shape_call(call: dict[str, Any], turn: TurnForm, number: int) -> dict[str, Any]:
    if turn.texts:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        call = {**call, "function": {**function, "arguments": arguments}}
    return {**call, "id": _short_id(str(call.get("id") or f"call_{number}"))} if turn.short else call


def _short_id(id: str) -> str:
    """An id as Mistral's templates want it, always the same for the same one."""
    if len(id) == SHORT_ID and id.isascii() and id.isalnum():
        return id
    return blake2b(id.encode("utf-8", "surrogatepass"), digest_size=SHORT_ID).hexdigest()[:SHORT_ID]


def _find_owners(calls: Sequence[Mapping[str, Any]], results: Sequence[Message]) -> list[int]:
    """Index of the call of each result: the call with its id, else the call in its place."""
    places = {str(call["id"]): place for place, call in enumerate(calls) if call.get("id")}
    last = len(calls) - 1
    return [places.get(str(result.get("tool_call_id")), min(place, last)) for place, result in enumerate(results)]


def _join_pairs(messages: Sequence[Message], traits: HistoryTraits) -> list[Message]:
    """Messages of which none follows one that it cannot follow: those become one."""
    runs: list[list[Message]] = []
    for message in messages:
        pair = (runs[-1][0]["role"], message["role"]) if runs else None
        if pair in JOINED and _has_text(runs[-1][0], message) and not traits.shows_pair(*pair):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


# Roles of messages that can become one message of the first role.
JOINED = (("user", "user"), ("assistant", "assistant"), ("tool", "user"))


def _has_text(before: Message, after: Message) -> bool:
    return "tool_calls" not in before and "tool_calls" not in after


def _joined(messages: Sequence[Message]) -> Message:
    """One message of several, with the fields of all."""
    fields: Message = {}
    for message in reversed(messages):
        fields |= message
    return {**fields, "content": SEPARATOR.join(message["content"] for message in messages if message["content"])}
