"""BatchKeeper: the batches that a server answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextvars import Context
from typing import TYPE_CHECKING

from weft.api.batches.answers import Endpoint
from weft.api.batches.attempts import LinePlaces
from weft.api.batches.runner import BatchRun
from weft.api.batches.store import Store, UnfinishedBatch
from weft.api.batches.store_thread import KEEPING_S, StoreThread
from weft.api.batches.uploads import UploadRoom
from weft.errors import ConfigError
from weft.http.clients import ANYBODY, current
from weft.http.errors import HttpError

if TYPE_CHECKING:
    from weft.api.service.service import Service

log = logging.getLogger("weft.serving")

POLL_S = 5.0  # seconds between two checks for batches of servers that have ended
CLEAN_S = 600.0


class BatchKeeper:
    """Answers the batches of the server's store, the batches of each key one after another.

    Lines of all keys share the `places`: half of the server's, so that places are left for other requests.
    """

    def __init__(self, service: Service, endpoints: Mapping[str, Endpoint]) -> None:
        self.store = StoreThread(service)
        self.endpoints = endpoints
        most_lines = max(1, min(service.capacity, service.plan.max_running * len(service.engine.replicas)) // 2)
        self.places = LinePlaces(most_lines)  # for lines that are being answered
        self.uploads = UploadRoom()
        self._arrived = asyncio.Event()  # a batch arrived
        self._arrivals = 0
        self._service = service
        self._working: asyncio.Task[None] | None = None
        self._answering: dict[str, asyncio.Task[None]] = {}  # by key
        self._runs: set[BatchRun] = set()
        self._unknown: set[str] = set()  # batches of keys that this server does not know
        self._clean_at = 0.0

    def resume(self) -> None:
        """Continue the batches that an earlier server has left, if there is a store."""
        if (self.store.folder / "store.sqlite").exists():
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
        await self.store.close()

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
                    self.store.log_fault(error)
                except Exception:  # a fault of one batch: the others go on, and this batch is tried again
                    log.exception("batch %s failed; it is tried again", batch.id)

    async def _clean(self) -> None:
        """Remove what has expired, every CLEAN_S seconds."""
        if time.monotonic() < self._clean_at:
            return
        self._clean_at = time.monotonic() + CLEAN_S
        try:
            await self.store.call(lambda store: store.remove_expired(time.time(), self.store.kept_s))
        except (ConfigError, HttpError) as error:
            self.store.log_fault(error)

    async def _unfinished(self) -> list[UnfinishedBatch]:
        """The batches that are not finished; none while the store cannot be read."""
        try:
            return await self.store.call(Store.unfinished)
        except (ConfigError, HttpError) as error:
            self.store.log_fault(error)
            return []

    async def _try(self, unfinished: UnfinishedBatch) -> None:
        """Answer a batch, unless another server does, or it means another server's models or keys."""
        store = await self.store.call(lambda store: store)
        with store.claim(unfinished.id) as claimed:
            batch = await self.store.call(lambda store: store.batch(unfinished.owner, unfinished.id))
            if not claimed or batch is None:
                return
            client = self._service.clients.of_batch(unfinished.key, unfinished.owner)
            if client is None and unfinished.id not in self._unknown:
                self._unknown.add(unfinished.id)
                log.warning(
                    "batch %s is of a key that this server does not have: it is not answered here", unfinished.id
                )
            current.set(client or ANYBODY)  # not the client of the request that woke this task
            run = BatchRun(
                self._service,
                self.store,
                self.endpoints,
                self.places,
                unfinished.owner,
                batch,
                answers=client is not None,
            )
            self._runs.add(run)
            try:
                await run.finish()
            finally:
                self._runs.discard(run)
