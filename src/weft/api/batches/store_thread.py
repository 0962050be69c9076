"""StoreThread: the store of a server, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.api.batches.answers import NotNowError
from weft.api.batches.results import LineChange
from weft.api.batches.store import Store
from weft.api.batches.types import ExpiresAfter
from weft.api.service.service import Service
from weft.cache import cache_path
from weft.errors import ConfigError, error_reason
from weft.http.errors import HttpError

log = logging.getLogger("weft.serving")

T = TypeVar("T")

DAY_S = 24 * 3600.0
KEEPING_S = 2.0  # seconds to store the last answers at shutdown
WRITE_AGAIN_S = 5.0  # seconds after which an answer is written again, where the disk was full
LOG_EVERY_S = 60.0  # seconds between two lines about a store that cannot be used


class StoreThread:
    """Opens the store when it is first needed, and calls its functions one after another."""

    def __init__(self, service: Service) -> None:
        folder = service.options.storage_directory
        self.folder = Path(folder).expanduser() if folder else cache_path() / "storage"
        self._service = service
        self._thread = ThreadPoolExecutor(1, "weft-store")
        self._store: Store | None = None
        self._log_at = 0.0
        self._changes: list[tuple[LineChange, asyncio.Future[str]]] = []  # of lines, to be written
        self._writing: asyncio.Task[None] | None = None

    @property
    def kept_s(self) -> float:
        """Seconds for which files are kept by default; 0: without limit."""
        return self._service.options.storage_days * DAY_S

    def lifetime_s(self, expiry: ExpiresAfter | None) -> int | None:
        """Seconds after which a new file expires; None for never."""
        kept_s = expiry.seconds if expiry is not None else self.kept_s
        return int(kept_s) if kept_s else None

    async def call(self, work: Callable[[Store], T]) -> T:
        """Call a function of the store. Raises ConfigError if it cannot be opened, and HttpError 503 for its faults."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._open()))
        except (sqlite3.Error, OSError) as error:
            raise storage_failed(error) from error

    async def write_line(self, change: LineChange) -> str:
        """Store a change of a line, and return its batch's status. Raises NotNowError if the server shuts down first.

        Changes that arrive while the disk is busy are one transaction.
        """
        written: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._changes.append((change, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_lines(), context=Context())
        return await asyncio.shield(written)

    async def _write_lines(self) -> None:
        while self._changes:
            waiting, self._changes = self._changes, []
            try:
                changes = [change for change, _ in waiting]
                statuses = await self._insist(partial(Store.write_lines, changes=changes))
            except NotNowError as error:
                for _, written in waiting:
                    written.set_exception(error)
                    written.exception()  # the waiting task may have been cancelled
            else:
                for (_, written), status in zip(waiting, statuses, strict=True):
                    written.set_result(status)

    async def _insist(self, work: Callable[[Store], T]) -> T:
        """Call a function of the store, and repeat it while it fails. Raises NotNowError if the server shuts down."""
        while True:
            try:
                return await self.call(work)
            except (ConfigError, HttpError) as error:
                if self._service.draining:
                    raise NotNowError from error
                self.log_fault(error)
            await asyncio.sleep(WRITE_AGAIN_S)

    def log_fault(self, error: Exception) -> None:
        """Log a fault of the store, at most one each LOG_EVERY_S seconds."""
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_EVERY_S
            log.error("%s; batches wait until it can be", error)

    async def close(self) -> None:
        """Write the last answers if the disk allows it, and close the store."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=KEEPING_S)  # it may wait for free disk space
            self._writing.cancel()
        if self._store is not None:
            await self.call(Store.close)
        self._thread.shutdown(wait=False)

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store(self.folder)
        return self._store


def storage_failed(error: Exception) -> HttpError:
    """The error of a request whose file or batch cannot be written."""
    return HttpError(
        503,
        f"the server's files and batches cannot be read or written: {error_reason(error)}; try again later",
        code="storage-failed",
        retry_after_s=60,
    )
