"""Server-sent events in a stream of bytes: whole events, in bounded memory, and the end of the last one."""

from __future__ import annotations

import re

from weft.fleet.upstreams.upstream import ResponseHead

EVENT_BYTES = 2**22  # largest event in bytes; log probabilities of many tokens at once are long
BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
DONE = b"[DONE]"


class EventSplitter:
    """Whole events of a stream; a line ends with LF, CRLF or CR. `end`: another end of an event."""

    def __init__(self, end: re.Pattern[bytes] = BLANK_LINE) -> None:
        self._end = end
        self._rest = b""

    @property
    def is_over_limit(self) -> bool:
        """True if the event that has begun is too long."""
        return len(self._rest) > EVENT_BYTES

    def push(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes, each with its blank line."""
        data, start = self._rest + piece, 0
        searched = max(0, len(self._rest) - 3)  # a blank line may begin in the rest
        events = []
        for blank in self._end.finditer(data, searched):
            events.append(data[start : blank.end()])
            start = blank.end()
        self._rest = data[start:]
        return events

    def take_rest(self) -> bytes:
        """The bytes after the last whole event, which are dropped."""
        rest, self._rest = self._rest, b""
        return rest


class EventEnding:
    """Tells if a response is a stream of events or lines, and how the bytes so far end."""

    END_MARK = re.compile(rb"(\A|[\r\n])data: ?\[DONE\]\s*\Z")  # in OpenAI's streams
    LONGEST = 32  # bytes that are examined

    def __init__(self, head: ResponseHead) -> None:
        self._ends: tuple[bytes, ...] = (b"\n\n", b"\r\n\r\n", b"\r\r") if head.is_event_stream else ()
        if head.is_line_stream:
            self._ends = (b"\n",)
        self._tail = b"\n\n"

    def push(self, piece: bytes) -> None:
        self._tail = (self._tail + piece[-self.LONGEST :])[-self.LONGEST :]

    @property
    def between_events(self) -> bool:
        return bool(self._ends) and self._tail.endswith(self._ends)

    @property
    def complete(self) -> bool:
        """True if the end mark has come: the client lacks nothing."""
        return self.between_events and self.END_MARK.search(self._tail) is not None


def event_data(event: bytes) -> bytes | None:
    """The data of an event that has one line of data and nothing else; None for comments and other events."""
    line = event.strip()
    if not line.startswith(b"data:") or b"\n" in line or b"\r" in line:
        return None
    return line[5:].strip()
