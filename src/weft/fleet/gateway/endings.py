"""The end of a broken stream: an error event, if the bytes before it end an event."""

from __future__ import annotations

import re

from weft.api.ollama.stream import encode_error_line
from weft.api.responses.errors import encode_error
from weft.fleet.gateway.answer import ResumableAnswer
from weft.fleet.gateway.exchange import Exchange
from weft.fleet.upstreams.upstream import ResponseHead, UpstreamError
from weft.http.errors import HttpError
from weft.http.sse import encode_error_event


def error_event(exchange: Exchange, error: UpstreamError) -> bytes:
    """The last event of a broken stream: the replica's own error event, if it sent any."""
    answer, path = exchange.answer, exchange.scope["path"]
    if isinstance(answer, ResumableAnswer) and answer.error_event:
        return answer.error_event
    broken = HttpError(502, f"the upstream's answer broke: {error.public}", code=error.code)
    if path.startswith("/api/"):
        return encode_error_line(broken)
    if path == "/v1/responses":
        return encode_error(broken, answer.sent_events if isinstance(answer, ResumableAnswer) else 0)
    return encode_error_event(broken, path)


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
