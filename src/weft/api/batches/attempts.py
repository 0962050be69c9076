"""Attempts: the engines and servers that have died with a line of a batch, counted before the line is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from weft.engine.executors.ranks import CLOSED
from weft.engine.replicas.suspects import LOST
from weft.errors import EngineError, NoEngineError
from weft.http.errors import HttpError

# Stores the number of deaths with a line so that it survives the process.
NoteDeaths = Callable[[int], Awaitable[None]]


class Attempts:
    """The attempts to answer one line. `deaths`: engines and servers that have died with it.

    An attempt counts as a death from its beginning until its outcome is known, since a killed process cannot count.
    """

    def __init__(self, deaths: int = 0, note: NoteDeaths | None = None) -> None:
        self.deaths = self._noted = deaths
        self._note = note

    @property
    def alone(self) -> bool:
        """True if the line must be sent alone, since it may be the cause of deaths."""
        return self.deaths >= LOST

    @property
    def spent(self) -> bool:
        """True if the line must not be sent again: an engine or a server has died with it alone."""
        return self.deaths > LOST

    async def begin(self) -> None:
        """Note that the line is about to be sent."""
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


class LinePlaces:
    """Places for lines that are being answered: at most `most` lines, or a single line that takes all places."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._free = asyncio.Semaphore(most)
        self._turn = asyncio.Lock()  # held by the line that collects all places

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
