"""RequestTimer: the time within which a client has to send the next part of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal


class RequestTimer:
    """Calls `expire` with the part and its seconds if they pass. `part` is the part that it runs for, "" if none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[str, float], None]) -> None:
        self._loop, self._expire = loop, expire
        self._handle: asyncio.TimerHandle | None = None
        self.part: Literal["", "head", "body"] = ""

    def start(self, part: Literal["head", "body"], seconds: float) -> None:
        self.stop()
        self._handle, self.part = self._loop.call_later(seconds, self._end, part, seconds), part

    def close_later(self, seconds: float, transport: asyncio.Transport) -> None:
        """Close the connection after this number of seconds, instead of waiting for a request's end."""
        self.stop()
        self._handle = self._loop.call_later(seconds, transport.close)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle, self.part = None, ""

    def _end(self, part: str, seconds: float) -> None:
        self._handle, self.part = None, ""
        self._expire(part, seconds)
