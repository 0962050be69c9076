"""Reasoning between marks, before an answer: qwen3, deepseek_r1, glm45, kimi_k2 and mistral."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from weft.api.parsers.between import Trimmed
from weft.api.parsers.reader import Content, Event, Reader, Steps

THINK, THINK_END = "<think>", "</think>"
MISTRAL_THINK, MISTRAL_THINK_END = "[THINK]", "[/THINK]"
PROMPT_END = 64  # characters of a prompt's end in which its last mark stands

Rest = Callable[[Reader], Steps[None]]


@dataclass(frozen=True)
class ReasoningFormat:
    """A family's form of reasoning, between `start` and `end`.

    `always`: it reasons without a mark in the prompt or the answer. `ends`: further marks that end it.
    """

    name: str
    start: str = THINK
    end: str = THINK_END
    always: bool = False
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the parser must see."""
        return (self.start, self.end)

    def begin(self, prompt: str) -> Begin:
        """Return how the answer to a rendered prompt begins."""
        end = prompt[-PROMPT_END:].rstrip()
        if end.endswith(self.start):
            return Begin.INSIDE
        if end.endswith(self.end):
            return Begin.NONE
        return Begin.INSIDE if self.always else Begin.OPTIONAL


class Begin(Enum):
    """The ways in which an answer may begin, by what the prompt ends with."""

    INSIDE = "inside"  # the prompt has begun the reasoning
    OPTIONAL = "optional"  # the answer may begin with it
    NONE = "none"  # the prompt has ended it


def think(reader: Reader, form: ReasoningFormat, begin: Begin, rest: Rest, calls: tuple[str, ...] = ()) -> Steps[None]:
    """Reasoning, and then what `rest` parses. The marks in `form.ends` end the reasoning too, and belong to the rest.

    `calls`: marks of calls. Calls at the end of an answer that is nothing but reasoning are calls; else such marks are
    what the model says of them.
    """
    if begin is not Begin.NONE:
        spaces = yield from reader.skip()
        opened = yield from reader.accept(form.start)
        if opened is None and begin is Begin.OPTIONAL:
            reader.unread(spaces)
        else:
            yield from _reason(reader, form, rest, tuple(mark for mark in calls if mark not in form.ends))
    yield from rest(reader)


def _reason(reader: Reader, form: ReasoningFormat, rest: Rest, calls: tuple[str, ...]) -> Steps[None]:
    trimmed = Trimmed(reader.reasoning)
    ends = (form.end, *form.ends)
    mark = yield from reader.until((*ends, *calls), trimmed.say)
    if mark is not None and mark in calls:
        held = [mark]
        mark = yield from reader.until(ends, held.append)
        text = "".join(held)
        is_last = mark not in form.ends and (yield from reader.ahead(_is_last(reader)))
        events = _calls_at_end(text, rest, trimmed, cut=reader.cut) if is_last else []
        if not events:
            trimmed.say(text)
        reader.events += events
    if mark in form.ends:
        reader.unread(mark)
    else:
        yield from reader.skip()


def _is_last(reader: Reader) -> Steps[bool]:
    """Return True if nothing but white space follows."""
    yield from reader.skip()
    return (yield from reader.ends())


class _EndReader(Reader):
    """A reader that knows where the last text of the answer ends."""

    def __init__(self) -> None:
        super().__init__()
        self.text_end = 0
        self.events_before = 0

    def content(self, text: str) -> None:
        if text.strip():
            self.text_end, self.events_before = self._at, len(self.events) + 1
        super().content(text)


def _calls_at_end(text: str, rest: Rest, trimmed: Trimmed, *, cut: bool) -> list[Event]:
    """The calls behind all that is text in the last part of an answer; the text before them is said."""
    reader = _EndReader()
    reader.add(text)
    reader.ended, reader.cut = True, cut
    for _ in rest(reader):
        pass  # all of the text is there
    events: list[Event] = [event for event in reader.events[reader.events_before :] if not isinstance(event, Content)]
    if events:
        trimmed.say(text[: reader.text_end])
    return events


def plain(reader: Reader) -> Steps[None]:
    """An answer that is text and nothing else."""
    while (yield from reader.peek(1)):
        reader.content(reader.rest())
