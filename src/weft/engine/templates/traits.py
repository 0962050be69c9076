"""Traits: what a template shows of a history, learnt by rendering small conversations.

The texts of such a conversation are words that no template has. A template shows a message if it renders the
conversation and all its words are in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import count, product
from typing import Any

from weft.engine.templates.call_forms import HERMES
from weft.engine.templates.histories import CallTurn, TurnForm, write_turn
from weft.engine.templates.messages import Message

WORD = "weftprobe"
MOST_LEADING = 4  # messages before the first of a user that are tried as they are; more become one
NULLS = ("None", "null")  # a missing content, printed
# Simplest first.
FORMS = [
    TurnForm(split, null, texts, short)
    for split, short, texts, null in product((False, True), (False, True), (False, True), (None, ""))
]
EMPTY_TEXTS = ("", " ", "...")

# A template that shows tools is asked with this one.
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a value up.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "The value."}},
            "required": ["value"],
        },
    },
}

Render = Callable[[Sequence[Message]], str | None]


class Traits:
    """Traits of the template behind `render`, which returns the text of messages, or None if it refuses them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._words = (f"{WORD}{number}x" for number in count())
        self._try_leading = cache(self._shows_leading)
        self.shows_later = cache(self._shows_later)
        self.shows_pair = cache(self._shows_pair)
        self.turn_form = cache(self._turn_form)

    @cached_property
    def shows_turns(self) -> bool:
        """True if the messages of a user and an assistant are shown."""
        return self._shows([*self._turns("ua"), *self._turns("u")])

    @cached_property
    def empty_text(self) -> str:
        for text in EMPTY_TEXTS:
            empty = {"role": "assistant", "content": text}
            if self._shows([*self._turns("u"), empty, *self._turns("u")]):
                return text
        return ""

    @cached_property
    def shows_lone_result(self) -> bool:
        alone = [*self._turns("u"), self._result(None)]
        return self._shows(alone) and self._shows([*alone, *self._turns("au")])

    def shows_leading(self, roles: tuple[str, ...], result_last: bool) -> bool:
        return len(roles) <= MOST_LEADING and self._try_leading(roles, result_last)

    def _shows_leading(self, roles: tuple[str, ...], result_last: bool) -> bool:
        leading = [self._message(role) for role in roles]
        if result_last:
            return self._shows([*leading, *self._answered_call()])
        return self._shows([*leading, *self._turns("u")]) and self._shows([*leading, *self._turns("uau")])

    def _shows_later(self, role: str) -> bool:
        def later(before: str, after: str) -> bool:
            return self._shows(
                [self._message("system"), *self._turns(before), self._message(role), *self._turns(after)]
            )

        return later("u", "") and later("u", "au") and later("ua", "u") and later("uau", "au")

    def _shows_pair(self, before: str, after: str) -> bool:
        first = self._turns("ua")
        if before == "tool":
            first = self._answered_call()
        elif before == "user":
            first = self._turns("u")
        pair = [*first, self._message(after)]
        return self._shows([*pair, *self._turns("u" if after == "assistant" else "au")])

    def _turn_form(self, turn: CallTurn) -> TurnForm | None:
        message, results = self._calls(turn)
        wanted = [*_texts(message, turn.content), *(result["content"] for result in results)]
        before, after = self._turns("u"), self._turns("au" if turn.answered else "ua")
        for form in FORMS:
            history = before + write_turn(form, message, results, HERMES)
            if self._shows(history, wanted) and self._shows(history + after, wanted):
                return form
        return None

    def _answered_call(self) -> list[Message]:
        """A conversation up to the result of a call."""
        turn = CallTurn(content=False, reasoning=False, several=False, answered=True)
        return self._turns("u") + write_turn(self.turn_form(turn), *self._calls(turn), HERMES)

    def _calls(self, turn: CallTurn) -> tuple[Message, list[Message]]:
        """A message with calls, and their results."""
        calls: list[dict[str, Any]] = []
        for letter in "ab" if turn.several else "a":
            function = {"name": next(self._words), "arguments": {"value": next(self._words)}}
            calls.append({"id": f"call_{letter * 24}", "type": "function", "function": function})
        message: Message = {**self._message("assistant"), "tool_calls": calls}
        if not turn.content:
            message["content"] = None
        if turn.reasoning:
            message["reasoning_content"] = message["thinking"] = next(self._words)
        return message, [self._result(call["id"]) for call in calls] if turn.answered else []

    def _turns(self, letters: str) -> list[Message]:
        roles = {"u": "user", "a": "assistant"}
        return [self._message(roles[letter]) for letter in letters]

    def _message(self, role: str) -> Message:
        return {"role": role, "content": next(self._words)}

    def _result(self, id: str | None) -> Message:
        return self._message("tool") | ({"tool_call_id": id} if id else {})

    def _shows(self, messages: Sequence[Message], wanted: Sequence[str] | None = None) -> bool:
        """True if the template renders messages with all these texts, without a null in place of any."""
        text = self._render(messages)
        if text is None:
            return False
        if wanted is None:
            wanted = [message["content"] for message in messages if message["content"]]
        if not all(part in text for part in wanted):
            return False
        return not self._has_null(messages) or self._nulls(text) == self._nulls(self._render(messages[:1]) or "")

    @staticmethod
    def _has_null(messages: Sequence[Message]) -> bool:
        return any(message["content"] is None for message in messages)

    @staticmethod
    def _nulls(text: str) -> list[int]:
        return [text.count(null) for null in NULLS]


def _texts(message: Message, content: bool) -> Iterator[str]:
    """The texts of a message with calls that must be shown."""
    if content:
        yield message["content"]
    for call in message["tool_calls"]:
        yield call["function"]["name"]
        yield call["function"]["arguments"]["value"]
