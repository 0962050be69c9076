"""Watches on the clients of running requests."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive

from weft.fleet.gateway.exchange import Exchange

WATCH_AFTER_S = 0.02


class ClientWatches:
    """Cancels requests whose clients have closed their connections.

    Short requests end before they are watched: one timer for all finds the requests older than WATCH_AFTER_S.
    """

    def __init__(self) -> None:
        self._waiting: dict[Exchange, Receive] = {}  # in the order of their beginning
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, exchange: Exchange, receive: Receive) -> None:
        self._waiting[exchange] = receive
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look)

    def end(self, exchange: Exchange) -> None:
        self._waiting.pop(exchange, None)
        task = self._tasks.pop(exchange, None)
        if task is not None:
            task.cancel()

    def _look(self) -> None:
        """Watch the clients of all requests that have lasted for WATCH_AFTER_S."""
        self._timer = None
        now = time.monotonic()
        while self._waiting:
            exchange, receive = next(iter(self._waiting.items()))
            remaining_s = exchange.began_s + WATCH_AFTER_S - now
            if remaining_s > 0:
                self._timer = asyncio.get_running_loop().call_later(remaining_s, self._look)
                return
            del self._waiting[exchange]
            self._tasks[exchange] = asyncio.create_task(self._watch(exchange, receive))

    @staticmethod
    async def _watch(exchange: Exchange, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.leave()
