"""EngineCore: the scheduler's decisions, the executor's results, and what becomes of a failure."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from time import monotonic
from typing import Literal, NoReturn, Protocol, cast

from weft.config import EngineConfig
from weft.core.blocks import BlockPool
from weft.core.pace import Pace
from weft.core.request import Output, Request, Stats
from weft.core.scheduler import Scheduler
from weft.core.speculation_gate import SpeculationGate
from weft.core.step import StepPlan, StepResult
from weft.errors import Cause, EngineError
from weft.plan.plan import Plan

logger = logging.getLogger("weft")


class Submits(Protocol):
    """What the core needs of an executor that has started: steps are carried out in the order of their submission."""

    def submit(self, step: StepPlan) -> Future[StepResult]: ...


class EngineCore:
    """Keeps up to `depth` steps in flight on an executor that has started.

    Whoever drives it calls `pump` after each message and each finished step, and `finish_oldest` once the future in
    `pending[0]` is done. With a `pace`, prompts delay the tokens of running requests only so long; which step computes
    which part of a prompt then depends on the clock.

    Once a step has failed, everything but `abort` and `stats` raises its EngineError.
    """

    def __init__(self, scheduler: Scheduler, executor: Submits, *, depth: int, pace: Pace | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.pending: deque[Future[StepResult]] = deque()
        self.failure: EngineError | None = None
        # When requests that have no token yet took part in their first step.
        self._scheduled_s: dict[str, float] = {}
        self._speculation_gate = SpeculationGate(monotonic) if scheduler.speculation else None
        self._pace = pace

    @classmethod
    def start(
        cls, plan: Plan, num_blocks: int, executor: Submits, config: EngineConfig, *, paced: bool = False
    ) -> EngineCore:
        """A core with the plan's limits and the config's policies, one step in flight per stage, or one ahead. `paced`
        is for servers, whose streams are read while they come."""
        scheduler = Scheduler(
            pool=BlockPool(num_blocks, plan.block_size, caching=config.enable_prefix_caching),
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_num_queued=config.max_num_queued_reqs,
            max_model_len=plan.max_model_len,
            stages=plan.stages,
            policy=cast(Literal["fcfs", "priority"], config.scheduling_policy),
            lookahead=plan.lookahead,
            speculation=plan.speculation,
        )
        pace = Pace(monotonic, plan.max_num_batched_tokens) if paced else None
        return cls(scheduler, executor, depth=plan.stages + plan.lookahead, pace=pace)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, QueueFullError, EngineError."""
        self._raise_failure()
        self.scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; those that are not there any more are no error, and nothing more comes for any."""
        ids = list(ids)
        self.scheduler.abort(ids)
        for id in ids:
            self._scheduled_s.pop(id, None)

    def pump(self) -> None:
        """Submit steps while fewer than `depth` are in flight and there is something to run. Never waits."""
        self._raise_failure()
        while len(self.pending) < self.depth and (plan := self._next()):
            for id in self.scheduler.started:
                self._scheduled_s[id] = monotonic()
            try:
                self.pending.append(self.executor.submit(plan))
            except Exception as error:
                self._fail(error)

    def finish_oldest(self) -> list[Output]:
        """Wait for the oldest step in flight and return what it brought."""
        self._raise_failure()
        try:
            # It stays in `pending` until it is there: an interrupted wait loses nothing.
            result = self.pending[0].result()
        except Exception as error:
            self._fail(error)
        self.pending.popleft()
        if self._pace:
            self._pace.step_finished()
        outputs = self.scheduler.apply(result)
        if result.failed:
            for output in outputs:
                if output.error:
                    logger.error("request %s ended: %s", output.id, output.error)
        if self._speculation_gate:
            self._speculation_gate.step_finished(sum(len(output.tokens) for output in outputs), result.drafts)
        if self._scheduled_s:
            for output in outputs:
                output.scheduled_s = self._scheduled_s.pop(output.id, None)
        return outputs

    def _next(self) -> StepPlan | None:
        """The next step, at the pace, and with guesses if they pay."""
        if self._pace:
            self.scheduler.prompt_limit = self._pace.tokens
        plan = self._schedule()
        if self._pace and plan:
            self._pace.step_started(self.scheduler.prompt_tokens)
        return plan

    def _schedule(self) -> StepPlan | None:
        if self._speculation_gate is None:
            return self.scheduler.schedule()
        rows = self.scheduler.active
        self.scheduler.speculating = self._speculation_gate.allows_drafts(rows)
        plan = self.scheduler.schedule()
        if plan:
            self._speculation_gate.step_started(plan, rows)
        return plan

    def stats(self) -> Stats:
        """Gauges of now, counters since start. `steps` grows with every finished step: it is the sign of life."""
        return self.scheduler.stats()

    def _raise_failure(self) -> None:
        if self.failure:
            raise self.failure

    def _fail(self, error: Exception) -> NoReturn:
        self.pending.clear()
        if isinstance(error, EngineError):
            self.failure = error
            raise error
        self.failure = EngineError(Cause(rank=-1, phase="step", cause=f"{type(error).__name__}: {error}"))
        raise self.failure from error
