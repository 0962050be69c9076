"""JoinedTransport: sends a response's head together with the first bytes of its body, in one write."""

from __future__ import annotations

import asyncio
from typing import Any

JOINED = "weft.joined"  # key of an http.response.start whose body follows at once, and is not empty


class JoinedTransport:
    """Stands in for the transport of `cycle`, uvicorn's response, until its second write."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport
        self._head = b""
        cycle.transport = self

    def write(self, data: bytes) -> None:
        """Hold the first bytes; send the next ones behind them."""
        if self._head:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)
        self._head = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
