"""LocalEngine: the core in this process, for whoever may wait for its steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

import msgspec

from weft.client.interrupts import Uninterrupted
from weft.config import EngineConfig
from weft.core.engine import EngineCore
from weft.core.request import Output, Request, Stats
from weft.errors import QueueFullError
from weft.executors import create
from weft.facts.checkpoint import Checkpoint
from weft.facts.host import probe
from weft.planner.execution import plan_to_run
from weft.planner.memory import capacity_lines, fit_length
from weft.planner.plan import Plan

log = logging.getLogger("weft")


@dataclass
class Run:
    """The requests that one caller waits for, and what has come for them."""

    open: set[str] = field(default_factory=set)
    news: deque[Output] = field(default_factory=deque)


class LocalEngine:
    """An engine that has started. `plan` is what is executed, with the length that is served; every rank has
    `num_blocks` KV blocks, and `capacities` is what they reported; `host` is the machine as it was before. For one
    thread; several `run`s may be open at once and take turns."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.host = probe()
        plan = plan_to_run(config, checkpoint, self.host)
        kind = config.executor or ("inline" if len(plan.places) == 1 else "processes")
        self._executor = create(kind)
        try:
            ready = self._executor.start(plan)
            self.num_blocks, self.capacities = ready.num_blocks, ready.ranks
            self.plan: Plan = msgspec.structs.replace(plan, max_model_len=fit_length(plan, ready.num_blocks))
            self._core = EngineCore.start(self.plan, ready.num_blocks, self._executor, config)
        except BaseException:
            self._executor.close()
            raise
        for line in capacity_lines(plan, ready.num_blocks):
            log.info(line)
        self._runs: dict[str, Run] = {}

    def run(self, requests: Iterable[Request]) -> Generator[Output, None, None]:
        """What the steps bring for `requests`, until the last has ended; more than the queue holds are added as
        room appears. Closing it early aborts the rest. Raises RequestError and EngineError."""
        waiting, run = deque(requests), Run()
        try:
            while waiting or run.open:
                if not run.news:
                    self._wait()
                    with Uninterrupted():
                        self._advance(waiting, run)
                while run.news:
                    output = run.news.popleft()
                    if output.finish_reason is not None:
                        self._forget(output.id)
                    yield output
        finally:
            self.abort(list(run.open))

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests, wherever they are."""
        ids = list(ids)
        with Uninterrupted():
            self._core.abort(ids)
            for id in ids:
                self._forget(id)

    def stats(self) -> Stats:
        return self._core.stats()

    def close(self) -> None:
        """End every rank; may be called twice."""
        self._executor.close()

    def _feed(self, waiting: deque[Request], run: Run) -> None:
        while waiting:
            try:
                self._core.add(waiting[0])
            except QueueFullError:
                return
            request = waiting.popleft()
            run.open.add(request.id)
            self._runs[request.id] = run

    def _wait(self) -> None:
        """Until the oldest step in flight is there, or has failed. Ctrl-C ends this and loses nothing."""
        if self._core.pending:
            self._core.pending[0].exception()

    def _advance(self, waiting: deque[Request], run: Run) -> None:
        """Take what the oldest step brought, then let the ranks go on. Never waits, and is never left half done:
        a step that some ranks know of and others do not would be waited for for ever."""
        outputs = self._core.finish_oldest() if self._core.pending else []
        for output in outputs:
            self._runs[output.id].news.append(output)
        self._feed(waiting, run)
        self._core.pump()

    def _forget(self, id: str) -> None:
        run = self._runs.pop(id, None)
        if run is not None:
            run.open.discard(id)
