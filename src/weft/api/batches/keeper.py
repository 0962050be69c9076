"""BatchKeeper: the store of a server, in a thread of its own, and the batches that the server answers."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weft.api.batches.answers import Endpoint, NotNowError
from weft.api.batches.attempts import Places
from weft.api.batches.results import LineChange
from weft.api.batches.runner import BatchRun
from weft.api.batches.store import Store, UnfinishedBatch
from weft.api.batches.types import ExpiresAfter
from weft.api.batches.uploads import UploadRoom
from weft.cache import cache_path
from weft.errors import ConfigError, error_reason
from weft.http.clients import ANYBODY, current
from weft.http.errors import HttpError

if TYPE_CHECKING:
    from weft.api.service.service import Service

log = logging.getLogger("weft.serving")

T = TypeVar("T")

POLL_S = 5.0  # seconds between two checks for batches of servers that have ended
CLEAN_S = 600.0
DAY_S = 24 * 3600.0
KEEPING_S = 2.0  # seconds to store the last answers at shutdown
WRITE_AGAIN_S = 5.0  # seconds after which an answer is written again, where the disk was full
LOG_EVERY_S = 60.0  # seconds between two lines about a store that cannot be used


class BatchKeeper:
    """Opens the store when it is first needed, and answers its batches, the batches of each key one after another.

    Lines of all keys share the `places`: half of the server's, so that places are left for other requests.
    """

    def __init__(self, service: Service, endpoints: Mapping[str, Endpoint]) -> None:
        folder = service.options.storage_directory
        self.folder = Path(folder).expanduser() if folder else cache_path() / "storage"
        self.endpoints = endpoints
        self.most_lines = max(1, min(service.capacity, service.plan.max_running * len(service.engine.replicas)) // 2)
        self.places = Places(self.most_lines)  # for lines that are being answered
        self.uploads = UploadRoom()
        self._arrived = asyncio.Event()  # a batch arrived
        self._arrivals = 0
        self._service = service
        self._thread = ThreadPoolExecutor(1, "weft-store")
        self._store: Store | None = None
        self._working: asyncio.Task[None] | None = None
        self._answering: dict[str, asyncio.Task[None]] = {}  # by key
        self._runs: set[BatchRun] = set()
        self._unknown: set[str] = set()  # batches of keys that this server does not know
        self._clean_at = self._log_at = 0.0
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
                self._log_fault(error)
            await asyncio.sleep(WRITE_AGAIN_S)

    def _log_fault(self, error: Exception) -> None:
        """Log a fault of the store, at most one each LOG_EVERY_S seconds."""
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_EVERY_S
            log.error("%s; batches wait until it can be", error)

    def resume(self) -> None:
        """Continue the batches that an earlier server has left, if there is a store."""
        if (self.folder / "store.sqlite").exists():
            self.start()

    def start(self) -> None:
        """Start to answer batches if no task does, and have it check for new batches."""
        for run in self._runs:
            run.news.set()
        self._arrivals += 1
        self._arrived.set()
        if self._working is None or self._working.done():
            # In a new context: its log lines and traces do not belong to the request that wakes it.
            self._working = asyncio.create_task(self._work(), context=Context())

    async def close(self) -> None:
        """Release the batches; their answers are kept."""
        if self._working is not None:
            self._working.cancel()
            answering = self._answering.values()
            if self._service.draining and answering:
                # The engine's last answers are stored a moment after it gave them.
                await asyncio.wait(answering, timeout=KEEPING_S)
            for task in answering:
                task.cancel()
            await asyncio.gather(self._working, *answering, return_exceptions=True)
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

    async def _work(self) -> None:
        """Have the batches of each key answered by a separate task: one key's limits delay no other key."""
        while not self._service.draining:
            self._arrived.clear()
            await self._clean()
            for key in {batch.key for batch in await self._unfinished()}:
                task = self._answering.get(key)
                if task is None or task.done():
                    self._answering[key] = asyncio.create_task(self._answer_all(key))
            try:
                async with asyncio.timeout(POLL_S):
                    await self._arrived.wait()
            except TimeoutError:
                continue

    async def _answer_all(self, key: str) -> None:
        """Answer the batches of a key, including batches that arrive later."""
        seen = -1
        while seen != self._arrivals:
            seen = self._arrivals
            for batch in await self._unfinished():
                if self._service.draining:
                    return
                if batch.key != key:
                    continue
                try:
                    await self._try(batch)
                except (ConfigError, HttpError, OSError) as error:
                    self._log_fault(error)
                except Exception:  # a fault of one batch: the others go on, and this batch is tried again
                    log.exception("batch %s failed; it is tried again", batch.id)

    async def _clean(self) -> None:
        """Remove what has expired, every CLEAN_S seconds."""
        if time.monotonic() < self._clean_at:
            return
        self._clean_at = time.monotonic() + CLEAN_S
        try:
            await self.call(lambda store: store.remove_expired(time.time(), self.kept_s))
        except (ConfigError, HttpError) as error:
            self._log_fault(error)

    async def _unfinished(self) -> list[UnfinishedBatch]:
        """The batches that are not finished; none while the store cannot be read."""
        try:
            return await self.call(Store.unfinished)
        except (ConfigError, HttpError) as error:
            self._log_fault(error)
            return []

    async def _try(self, unfinished: UnfinishedBatch) -> None:
        """Answer a batch, unless another server does, or it means another server's models or keys."""
        store = await self.call(lambda store: store)
        with store.claim(unfinished.id) as claimed:
            batch = await self.call(lambda store: store.batch(unfinished.owner, unfinished.id))
            if not claimed or batch is None:
                return
            client = self._service.clients.of_batch(unfinished.key, unfinished.owner)
            if client is None and unfinished.id not in self._unknown:
                self._unknown.add(unfinished.id)
                log.warning(
                    "batch %s is of a key that this server does not have: it is not answered here", unfinished.id
                )
            current.set(client or ANYBODY)  # not the client of the request that woke this task
            run = BatchRun(self._service, self, unfinished.owner, batch, answers=client is not None)
            self._runs.add(run)
            try:
                await run.finish()
            finally:
                self._runs.discard(run)


def storage_failed(error: Exception) -> HttpError:
    """The error of a request whose file or batch cannot be written."""
    return HttpError(
        503,
        f"the server's files and batches cannot be read or written: {error_reason(error)}; try again later",
        code="storage-failed",
        retry_after_s=60,
    )
