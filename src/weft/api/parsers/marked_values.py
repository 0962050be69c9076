"""Values as plain text between marks, with the ends that models write: a mark may also be part of the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from weft.api.parsers.reader import SPACES, Reader, Steps

MAX_END = 64  # characters of the end of a value in which an odd end is looked for


@dataclass(frozen=True)
class ValueForm:
    """Marks around a value: its end, the next key, and the ends and beginnings of calls, innermost first.

    `read_key` reads the key behind `next`, and `read_head` the beginning of a call behind an opening mark; both return
    None for none. `odd_end`: expression of an end that is not written as it should be. `own_lines`: the line breaks
    around a value are no part of it.
    """

    end: str
    next: str
    closings: tuple[str, ...]
    openings: tuple[str, ...]
    read_key: Callable[[Reader], Steps[str | None]]
    read_head: Callable[[Reader, str], Steps[str | None]]
    odd_end: re.Pattern[str]
    own_lines: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that may end a value."""
        return (self.end, self.next, *self.closings, *self.openings)


class ValueReader:
    """Reads one value up to its end.

    A mark ends it only if the call goes on or ends behind that. Another mark, as in a file that is about such marks,
    belongs to the text. An end may be missing: the next key, the end of the call or of the answer end a value too, at
    the beginning of a line unless the value has one line only. A whole call within a text is text, if an end of the
    value follows, and so is a mark that is indented.
    """

    def __init__(self, reader: Reader, form: ValueForm, may_follow: Callable[[str], bool]) -> None:
        self._reader, self._form = reader, form
        self._may_follow = may_follow  # True for a key that may be the next
        self._parts: list[str] = []
        self._has_lines, self._at_line_start = False, True
        self._quotes = True  # calls within the value are taken for text
        self._quoted_from: int | None = None  # index of the part that begins the first of them

    def read_value(self) -> Steps[str | None]:
        """The value; None if the answer is cut within it."""
        value = yield from self._read_text()
        return value.removeprefix("\n").removesuffix("\n") if value and self._form.own_lines else value

    def _read_text(self) -> Steps[str | None]:
        reader, form = self._reader, self._form
        while True:
            mark = yield from reader.until(form.marks, self._add)
            if mark is None and not self._read_quoted_again():
                return None if reader.cut else self._without_end()
            if mark is None:
                continue
            if mark == form.end and (yield from reader.ahead(self._goes_on())):
                return "".join(self._parts)
            if mark in form.openings and self._may_end_here():
                ends = yield from self._read_opening(mark)
            else:
                ends = mark != form.end and self._may_end_here() and (yield from reader.ahead(self._is_end(mark)))
                if not ends:
                    self._add(mark)
            if ends:
                reader.unread(mark)
                return self._without_end()

    def _read_opening(self, mark: str) -> Steps[bool]:
        """Add the call that a mark begins to the text; returns True, and adds nothing, if it ends the value."""
        is_call = (yield from self._reader.ahead(self._form.read_head(self._reader, mark))) is not None
        if is_call and not self._quotes and not self._reader.cut:
            return True
        is_outer = mark == self._form.openings[-1] and self._has_lines  # also around calls of another form
        index = len(self._parts)
        self._add(mark)
        if self._quotes and (is_call or is_outer):
            self._quoted_from = index if self._quoted_from is None else self._quoted_from
            closing = self._form.closings[self._form.openings.index(mark)]
            end = yield from self._reader.until((closing,), self._add)
            self._add(end or "")
        return False

    def _read_quoted_again(self) -> bool:
        """Go back to the first call within the value: the answer has ended, and nothing the value behind that call."""
        if self._quoted_from is None or not self._quotes:
            return False
        self._reader.unread("".join(self._parts[self._quoted_from :]))
        del self._parts[self._quoted_from :]
        self._has_lines, self._at_line_start = any("\n" in part for part in self._parts), True
        self._quotes = False
        return True

    def _without_end(self) -> str:
        """The value without the odd end that it may have."""
        text = "".join(self._parts)
        return text[:-MAX_END] + self._form.odd_end.sub("", text[-MAX_END:])

    def _add(self, text: str) -> None:
        """Add a part of the text."""
        self._parts.append(text)
        _, line_break, rest = text.rpartition("\n")
        self._has_lines = self._has_lines or line_break != ""
        self._at_line_start = (self._at_line_start or line_break != "") and rest == ""

    def _may_end_here(self) -> bool:
        """Return True at the beginning of a line, or if the value has one line only."""
        return self._at_line_start or not self._has_lines

    def _goes_on(self) -> Steps[bool]:
        """Return True if the call goes on or ends behind the mark of a value's end."""
        reader, form = self._reader, self._form
        yield from reader.skip()
        mark = yield from reader.accept(form.next, *form.closings, *form.openings)
        if mark is None:
            return (yield from reader.ends())
        while mark in form.closings:
            if not (yield from self._is_free()):
                return False
            yield from reader.skip()
            mark = yield from reader.accept(*form.closings)
        return True

    def _is_free(self) -> Steps[bool]:
        """Return True if what follows a mark does not belong to it: white space, another mark, or nothing."""
        ahead = yield from self._reader.peek(1)
        return ahead == "" or ahead == "<" or SPACES.match(ahead) is not None

    def _is_end(self, mark: str) -> Steps[bool]:
        """Return True if a mark ends the value, though the value's own end is missing."""
        reader, form = self._reader, self._form
        if mark == form.next:
            key = yield from form.read_key(reader)
            return key is not None and self._may_follow(key)
        yield from reader.skip()
        others = (*form.closings[form.closings.index(mark) + 1 :], *form.openings)
        return (yield from reader.accept(*others)) is not None or (yield from reader.ends())
