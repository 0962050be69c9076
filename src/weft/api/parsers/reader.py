"""Reader: the text of an answer while it arrives, for parsers that are written as if it were all there.

A parser is a generator: it yields when it needs more text, and goes on where it was. Its events do not depend on how
the text is cut into pieces, because it reads only through this class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]  # yields to wait for more text, and returns a T
Take = Callable[[str], None]

SPACES = re.compile(r"[ \t\r\n]+")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool `name`; `id` if the format has ids."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the JSON of the last call's arguments."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class Reader:
    """Text that has arrived and is not read yet. `events`: the parser's results for the text before it.

    `ended`: nothing follows. `cut`: the end is not the model's own, so that an open call stays open.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = False
        self.cut = False
        self._text = ""
        self._at = 0
        self._kept: list[int] = []  # places from which the text is kept, though it is read

    def add(self, text: str) -> None:
        """Append text that has come."""
        start = min([*self._kept, self._at])
        self._text = self._text[start:] + text
        self._at -= start
        self._kept = [place - start for place in self._kept]

    # Output of a parser

    def content(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Say that a call begins. Text before it that is kept is no longer."""
        self._kept.clear()
        self.events.append(CallBegin(name, id))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(CallArguments(text))

    # Input of a parser

    def record(self) -> None:
        """Keep what is read from here on, for `recorded`."""
        self._kept.append(self._at)

    def recorded(self) -> str:
        """All that was read since the last `record`; "" if a call has begun since."""
        return self._text[self._kept.pop() : self._at] if self._kept else ""

    def ahead(self, steps: Steps[T]) -> Steps[T]:
        """Take steps that read, and unread what they have read."""
        self._kept.append(self._at)
        result = yield from steps
        self._at = self._kept.pop()
        return result

    def ends(self) -> Steps[bool]:
        """Return True if nothing follows."""
        return not (yield from self.peek(1))

    def peek(self, count: int) -> Steps[str]:
        """The next `count` characters, fewer only at the end of the answer. They stay unread."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> Steps[str]:
        """Read `count` characters, fewer only at the end of the answer."""
        text = yield from self.peek(count)
        return self._consume(len(text))

    def accept(self, *texts: str) -> Steps[str | None]:
        """Read one of `texts` if the next characters are that; the first that fits. None reads nothing."""
        for text in texts:
            length = 0
            while length < len(text):
                ahead = yield from self.peek(length + 1)
                if len(ahead) <= length or ahead[length] != text[length]:
                    break
                length += 1
            if length == len(text):
                return self._consume(length)
        return None

    def skip(self, run: re.Pattern[str] = SPACES) -> Steps[str]:
        """Read as long as the characters match `run`, a repeated set of characters; returns what was read."""
        parts: list[str] = []
        yield from self.read_run(run, parts.append)
        return "".join(parts)

    def read_run(self, run: re.Pattern[str], emit: Take) -> Steps[None]:
        """Read as long as the characters match `run`, and pass them to `emit` as they come."""
        while (yield from self.peek(1)):
            match = run.match(self._text, self._at)
            if not match:
                return
            emit(self._consume(match.end() - self._at))

    def until(self, marks: Iterable[str], emit: Take) -> Steps[str | None]:
        """Read up to the first of `marks` and over it; returns the mark, or None at the end of the answer.

        The text before it goes to `emit`, as far as it cannot be the beginning of a mark. No mark may contain another.
        """
        marks = tuple(marks)
        longest = max(map(len, marks))
        while True:
            places = [(at, mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0]
            if places:
                at, mark = min(places)
                emit(self._consume(at - self._at))
                self._consume(len(mark))
                return mark
            held = 0 if self.ended else _held(self._text, self._at, marks, longest)
            emit(self._consume(len(self._text) - self._at - held))
            if self.ended:
                return None
            yield

    def text_until(self, *marks: str) -> Steps[tuple[str, str | None]]:
        """Read up to the first of `marks` and over it; returns the text before it, and the mark."""
        parts: list[str] = []
        mark = yield from self.until(marks, parts.append)
        return "".join(parts), mark

    def rest(self) -> str:
        """Read all that has come."""
        return self._consume(len(self._text) - self._at)

    def unread(self, text: str) -> None:
        """Put back what was just read."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0

    def _consume(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        return text


def _held(text: str, start: int, marks: tuple[str, ...], longest: int) -> int:
    """Length of the longest end of `text` behind `start` that may be the beginning of a mark."""
    for length in range(min(longest - 1, len(text) - start), 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


class StreamParser:
    """One answer's parser. `parse` is a generator function over a Reader: a family's grammar."""

    def __init__(self, parse: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps: Steps[None] | None = parse(self._reader)

    def push(self, text: str) -> list[Event]:
        """Add the next piece of the answer's text; returns what it says."""
        self._reader.add(text)
        return self._read_events()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the answer; returns what was held back until then.

        `cut`: the model has not ended it. A call that is open then stays so, else it is closed.
        """
        self._reader.ended, self._reader.cut = True, cut
        return self._read_events()

    def _read_events(self) -> list[Event]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        events, self._reader.events = self._reader.events, []
        return events
