"""Attempts: the engines and servers that have died with a line of a batch, counted before the line is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from weft.client.suspects import LOST
from weft.errors import EngineError, NoEngineError
from weft.executors.ranks import CLOSED
from weft.serving.errors import HttpError

# Keeps the number of deaths with a line where a killed process leaves it.
NoteDeaths = Callable[[int], Awaitable[None]]


class Attempts:
    """The attempts to answer one line. `deaths`: engines and servers that have died with it.

    An attempt counts as a death from its beginning until it is known to be none: a process that the line kills can
    count no more.
    """

    def __init__(self, deaths: int = 0, note: NoteDeaths | None = None) -> None:
        self.deaths = self._noted = deaths
        self._note = note

    @property
    def alone(self) -> bool:
        """True if the line is to be asked while no other one is: it may be what kills."""
        return self.deaths >= LOST

    @property
    def spent(self) -> bool:
        """True if the line is not to be asked any more: an engine or a server has died with it alone."""
        return self.deaths > LOST

    async def begin(self) -> None:
        """Note that the line is about to be asked."""
        await self._keep(self.deaths + 1)

    async def settle(self, *, died: bool) -> None:
        """Note that the line has no answer, and whether an engine has died with it."""
        self.deaths += died
        await asyncio.shield(self._keep(self.deaths))

    async def _keep(self, number: int) -> None:
        changed, self._noted = number != self._noted, number
        if self._note is not None and changed:
            await self._note(number)


def lost_engine(error: Exception | None) -> bool:
    """Return True if an engine has died with the request that ended with an error."""
    cause = error.__cause__ if isinstance(error, HttpError) else error
    if isinstance(cause, EngineError):
        return cause.cause != CLOSED and not isinstance(cause, NoEngineError)
    return isinstance(error, HttpError) and error.code == "engine-restarts"


class Places:
    """Places for lines that are being answered: at most `most` at a time, or a single one that has all of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._free = asyncio.Semaphore(most)
        self._turn = asyncio.Lock()  # of the one that collects all places

    @asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[None]:
        """Hold a place while the block runs; `alone`: all of them."""
        if not alone:
            async with self._free:
                yield
            return
        held = 0
        try:
            async with self._turn:
                while held < self.most:
                    await self._free.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()
