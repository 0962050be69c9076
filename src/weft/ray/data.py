"""Offline batches on the engines of a Ray cluster: rows pass through Ray Data, which has an actor for each engine."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import Any, TypeVar

import msgspec

from weft import logs
from weft.api.batches.answers import NotNowError
from weft.api.offline.answering import AnsweredRow, RowKind, answer_row
from weft.api.offline.job import AttemptsOf, BatchJob, Keep, Rows
from weft.api.offline.rows import import_arrow
from weft.api.service.embedded import open_for_service, run_service
from weft.config import EngineConfig
from weft.engine.cluster.ray_cluster import connect, head_address
from weft.engine.executors.ray_calls import JOIN_S, call_watched
from weft.errors import CORE, Cause, EngineError
from weft.http.options import ServeOptions
from weft.ray.resources import actor_config, actor_resources, count_engines, import_library

BLOCK_ROWS = 32  # rows that an engine gets together, and whose answers come together
CALLS = 16  # blocks that an engine has at once
CLOSE_S = 5.0  # seconds for the end of an engine

T = TypeVar("T")


def answer_on_ray(job: BatchJob, rows: Rows, keep: Keep, attempts: AttemptsOf) -> None:
    """Answer rows with engines in the actors of a Ray cluster, which count the attempts themselves.

    Raises ConfigError if Ray Data or pyarrow is missing, PlanError if no node has room, and EngineError if an engine
    dies.
    """
    data, arrow = import_library("data"), import_arrow()
    ray = connect(os.environ, limit_s=float(job.config.start_timeout))
    config = actor_config(job.config)
    wanted = job.config.data_parallel_size if not job.config.enable_expert_parallel else None

    def count() -> tuple[dict[str, float], int]:
        resources = actor_resources(config, ray.cluster_resources().get("GPU", 0))
        return resources, count_engines(ray, config, resources, wanted)

    resources, engines = call_watched(count, head_address(ray), JOIN_S)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False  # the job has one
    context.wait_for_min_actors_s = config.start_timeout  # by default Ray Data waits without limit
    blocks = [ray.put(table) for table in _tables(arrow, rows)]
    answers = data.from_arrow_refs(blocks).map_batches(
        RowAnswerer,
        batch_size=BLOCK_ROWS,
        batch_format="pyarrow",
        fn_constructor_args=tuple(msgspec.json.encode(part) for part in (config, job.options, job.kind)),
        **resources,
        **_pool(data, min(engines, len(blocks))),
    )
    try:
        for table in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            for answered in table.to_pylist():
                keep(AnsweredRow(**answered))
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        raise EngineError(Cause(rank=CORE, phase="batch", code="ray-batch", cause=_last_line(error))) from None


def _tables(arrow: Any, rows: Rows) -> Iterator[Any]:
    """The rows in tables of `number` and `text`."""
    while chunk := list(islice(rows, BLOCK_ROWS)):
        numbers, texts = zip(*chunk, strict=True)
        yield arrow.Table.from_pydict({"number": list(numbers), "text": list(texts)})


def _pool(data: Any, engines: int) -> dict[str, Any]:
    """Options of a pool whose actors answer several blocks at once, in the words of the installed Ray."""
    words: dict[str, Any] = {
        "size": engines,
        "max_tasks_in_flight_per_actor": CALLS,
        "enable_true_multi_threading": True,
    }
    if "max_concurrent_calls_per_actor" in inspect.signature(data.ActorPoolStrategy).parameters:
        return {"compute": data.ActorPoolStrategy(**words, max_concurrent_calls_per_actor=CALLS)}
    return {"compute": data.ActorPoolStrategy(**words), "max_concurrency": CALLS}


def _last_line(error: BaseException) -> str:
    """The last line of a remote traceback, which says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RowAnswerer:
    """An engine in an actor. Ray Data calls it from several threads, with a block of rows each."""

    def __init__(self, config: bytes, options: bytes, kind: bytes) -> None:
        logs.configure()
        self._kind = msgspec.json.decode(kind, type=RowKind)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="weft-batch", daemon=True).start()
        self._run_on_loop(
            self._open(msgspec.json.decode(config, type=EngineConfig), msgspec.json.decode(options, type=ServeOptions))
        )

    async def _open(self, config: EngineConfig, options: ServeOptions) -> None:
        opened = await asyncio.to_thread(open_for_service, config)
        self._stack = AsyncExitStack()
        self._service = await self._stack.enter_async_context(run_service(config, options, opened))
        self._places = asyncio.Semaphore(min(self._service.capacity, self._service.plan.max_running + 1))

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __del__(self) -> None:
        """End the engine in order: Ray Data deletes this object when the job is done.

        Otherwise Ray kills the engine's processes first, which would be logged as a death. Processes that are left end
        with this one.
        """
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result(CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def __call__(self, rows: Any) -> dict[str, list[Any]]:
        """The answers to a table with `number` and `text`, as columns of Answered."""
        answers = self._run_on_loop(self._answer_all(rows.to_pylist()))
        return {name: [getattr(one, name) for one in answers] for name in AnsweredRow.__struct_fields__}

    async def _answer_all(self, rows: list[dict[str, Any]]) -> list[AnsweredRow]:
        async def take(row: dict[str, Any]) -> AnsweredRow:
            async with self._places:
                return await answer_row(self._service, self._kind, row["number"], row["text"])

        try:
            return await asyncio.gather(*map(take, rows))
        except NotNowError:
            raise RuntimeError(str(self._service.engine.failure or "the engine has ended")) from None
