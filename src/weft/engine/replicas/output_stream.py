"""OutputStream: the outputs of some requests, for the reader in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import NoReturn, Protocol

from weft.engine.core.request import Output
from weft.errors import WeftError

TURN_S = 0.005  # seconds for which a reader with a backlog keeps the event loop


class OutputSink(Protocol):
    """Receiver of what the core sends of some requests, in the event loop."""

    def put(self, item: Output | WeftError) -> None:
        """Take an output of a request, or the error with which its requests end."""
        ...

    def close_request(self, id: str) -> None:
        """Note that a request has no more outputs."""
        ...

    def drop_request(self, id: str) -> None:
        """Note that a request was aborted."""
        ...


class Aborter(Protocol):
    """The part of an engine that a stream needs when its reader goes."""

    def abort(self, ids: Iterable[str]) -> None: ...


class OutputStream(AsyncGenerator[Output, None]):
    """The outputs of the requests in `open`, in the order of the steps.

    Outputs of a request that was aborted before they were read are left out. A reader with a backlog yields to the
    event loop every TURN_S seconds, so that other streams, and the notice that its own client has gone, are handled in
    between.
    """

    def __init__(self, engine: Aborter, ids: Sequence[str]) -> None:
        self.open = dict.fromkeys(ids)
        self._engine = engine
        self._dropped: set[str] = set()
        self._turn_ends_s = 0.0
        # None ends the stream.
        self._items: asyncio.Queue[Output | WeftError | None] = asyncio.Queue()

    def put(self, item: Output | WeftError) -> None:
        self._items.put_nowait(item)

    def close_request(self, id: str) -> None:
        """Note that a request has no more outputs. The last one ends the stream."""
        self.open.pop(id, None)
        if not self.open:
            self._items.put_nowait(None)

    def drop_request(self, id: str) -> None:
        """Note that a request was aborted."""
        self._dropped.add(id)
        self.close_request(id)

    async def asend(self, value: None) -> Output:
        try:
            item = await self._next_item()
        except BaseException:
            self._engine.abort(list(self.open))
            raise
        if isinstance(item, Output):
            return item
        self._items.put_nowait(None)  # every later call ends the iteration too
        self._engine.abort(list(self.open))
        if item is None:
            raise StopAsyncIteration
        raise item

    async def _next_item(self) -> Output | WeftError | None:
        clock = asyncio.get_running_loop().time
        while True:
            yielded = self._items.empty()  # then the `get` below lets the event loop go on
            if not yielded and clock() > self._turn_ends_s:
                await asyncio.sleep(0)
                yielded = True
            item = await self._items.get()
            if yielded:
                self._turn_ends_s = clock() + TURN_S
            if not isinstance(item, Output) or item.id not in self._dropped:
                return item

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> NoReturn:
        """Abort the open requests: `aclose` calls this when the reader has gone."""
        self._engine.abort(list(self.open))
        self._items = asyncio.Queue()
        self._items.put_nowait(None)
        raise kind
