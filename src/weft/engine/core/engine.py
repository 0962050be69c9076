"""EngineCore: runs the scheduler and the executor step by step, and keeps the first failure."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from time import monotonic
from typing import Any, NoReturn, Protocol

from weft.config import EngineConfig
from weft.engine.core.commands import Command, CommandExecutor, CommandQueue, Replies, ResetPrefixCache
from weft.engine.core.grammar import FAILED, PARAM, Grammars, Matcher
from weft.engine.core.groups import GroupedScheduler
from weft.engine.core.kv import KVManager
from weft.engine.core.pace import FairPace, Pace
from weft.engine.core.request import Output, Request, Stats
from weft.engine.core.scheduled import UNLIMITED
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.speculation_gate import SpeculationGate
from weft.engine.core.step import EngineStep, LockStep, SlotFailure
from weft.engine.core.view import SchedulerSettings
from weft.errors import CORE, Cause, EngineError, RequestError, WeftError
from weft.plan.plan import Plan

logger = logging.getLogger("weft")


class StepExecutor(CommandExecutor, Protocol):
    """The part of a started executor that the core uses. Steps are executed in the order of their submission."""

    def submit(self, step: EngineStep) -> Future[Any]: ...


class EngineCore:
    """Keeps up to `depth` steps in flight on an executor that has started.

    The caller calls `pump` after each message and each finished step, and `finish_oldest` once the future in
    `pending[0]` is done. With a `pace`, prompts delay the tokens of running requests only for a limited time; which
    step computes which part of a prompt then depends on the clock.

    Once a step or a command has failed, everything but `abort` and `stats` raises its EngineError.
    """

    def __init__(
        self,
        scheduler: Scheduler | GroupedScheduler,
        executor: StepExecutor,
        *,
        depth: int,
        pace: Pace | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.pending: deque[Future[Any]] = deque()
        self.commands = CommandQueue(scheduler, executor)
        self.failure: EngineError | None = None
        # When requests that have no token yet took part in their first step.
        self._scheduled_s: dict[str, float] = {}
        self._speculation_gate = SpeculationGate(monotonic) if scheduler.settings.speculation else None
        self._pace = pace
        self._grammars = grammars
        self._compiling: dict[Future[Matcher], str] = {}
        self._uncompiled: list[Output] = []  # of requests whose grammar turned out to be unusable
        # Called with the future of a grammar when it is compiled: the owner then calls `pump`.
        self.wake: Callable[[Future[Matcher]], None] = lambda future: None

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        num_blocks: int,
        executor: StepExecutor,
        config: EngineConfig,
        *,
        paced: bool = False,
        grammars: Grammars | None = None,
    ) -> EngineCore:
        """Create a core with the plan's limits and the config's policies, and a scheduler for each attention group.

        One step is in flight per stage; with one stage, lookahead adds a second. `paced` is for callers who read
        streams as they grow (weft serve, AsyncLLM).
        """
        groups = [create_scheduler(plan, num_blocks, config, group, grammars) for group in range(plan.data_parallel)]
        scheduler = groups[0] if len(groups) == 1 else GroupedScheduler(groups)
        kind = FairPace if config.scheduling_policy == "fair" else Pace
        pace = kind(monotonic, plan.max_num_batched_tokens) if paced else None
        return cls(scheduler, executor, depth=plan.stages + plan.lookahead, pace=pace, grammars=grammars)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, QueueFullError, EngineError.

        A request with a grammar waits until the grammar is compiled; other requests go first.
        """
        self._raise_failure()
        if not request.grammar:
            self.scheduler.add(request)
            return
        if self._grammars is None:
            raise RequestError("this engine has no grammars", param=PARAM, code="no-structured-outputs")
        self.scheduler.add(request, prepared=False)
        future = self._grammars.compile(request.grammar, list(request.answered))
        self._compiling[future] = request.id
        future.add_done_callback(self.wake)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; they get no more output. Unknown ids are ignored."""
        ids = list(ids)
        self.scheduler.abort(ids)
        for id in ids:
            self._scheduled_s.pop(id, None)
        # A later request may have one of these ids, and its own grammar.
        gone = set(ids)
        for future in [future for future, id in self._compiling.items() if id in gone]:
            del self._compiling[future]
            future.cancel()  # a compilation that has begun runs to its end, and its result is dropped
        self._uncompiled = [output for output in self._uncompiled if output.id not in gone]

    def call(self, command: Command | ResetPrefixCache) -> Future[Replies]:
        """Have all ranks execute a command between two steps; see `CommandQueue`. Raises RequestError, EngineError."""
        self._raise_failure()
        return self.commands.add(command)

    def pump(self) -> None:
        """Submit steps while fewer than `depth` are in flight and there is something to run. Never waits."""
        self._raise_failure()
        if self._compiling:
            self._admit_compiled()
        if self.commands.holds and not self._finish_commands():
            return
        while len(self.pending) < self.depth and (plan := self._next_step()):
            try:
                self.pending.append(self.executor.submit(plan))
            except Exception as error:
                self._fail(error)

    def finish_oldest(self) -> list[Output]:
        """Wait for the oldest step in flight and return its outputs."""
        self._raise_failure()
        try:
            # The future stays in `pending` until it is done: an interrupted wait loses nothing.
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
                    logger.error("request %s ended: %s", output.id, output.error.reason)
        if self._speculation_gate:
            self._speculation_gate.step_finished(sum(len(output.tokens) for output in outputs), result.drafts)
        if self._scheduled_s:
            for output in outputs:
                output.scheduled_s = self._scheduled_s.pop(output.id, None)
        return outputs

    def _admit_compiled(self) -> None:
        """Let requests run whose grammars are compiled by now, and end requests whose grammars are unusable."""
        for future in [future for future in self._compiling if future.done()]:
            id = self._compiling.pop(future)
            error = future.exception()
            if error is None:
                self.scheduler.mark_prepared(id, future.result())
            elif self.scheduler.knows(id):
                self.scheduler.abort([id])
                self._uncompiled.append(Output(id, [], [], finish_reason="error", error=_grammar_failure(error)))

    def take_uncompiled(self) -> list[Output]:
        """Outputs of the requests that ended because their grammars could not be compiled, once."""
        outputs, self._uncompiled = self._uncompiled, []
        return outputs

    def _finish_commands(self) -> bool:
        """Start and finish commands; return True if steps may be submitted."""
        try:
            return self.commands.advance(len(self.pending))
        except Exception as error:
            self._fail(error)

    def _next_step(self) -> EngineStep | None:
        """Schedule the next step, with the pace's limits on its tokens, and with drafts if they save time."""
        pace, gate = self._pace, self._speculation_gate
        limits = pace.limits() if pace else UNLIMITED
        rows = self.scheduler.active if gate else 0
        if gate and not gate.allows_drafts(rows):
            limits = limits._replace(speculating=False)
        scheduled = self.scheduler.schedule(limits)
        if scheduled is None:
            return None
        step = scheduled.step
        if gate:
            gate.step_started(step, rows)
        if pace:
            pace.step_started(scheduled.prompt_tokens, _rows(step), scheduled.newcomer_tokens)
        for id in scheduled.started:
            self._scheduled_s[id] = monotonic()
        return step

    def stats(self) -> Stats:
        """Return the gauges of now and the counters since start. `steps` grows with every finished step."""
        stats = self.scheduler.stats()
        stats.sleep_level = self.commands.sleep_level
        return stats

    def _raise_failure(self) -> None:
        if self.failure:
            raise self.failure

    def _fail(self, error: Exception) -> NoReturn:
        self.pending.clear()
        if not isinstance(error, EngineError):
            code = error.code if isinstance(error, WeftError) else "internal-error"
            cause = f"{type(error).__name__}: {error}"
            error = EngineError(Cause(rank=CORE, phase="step", code=code, cause=cause))
        self.failure = error
        self.commands.fail(error)
        raise error


def _grammar_failure(error: BaseException) -> SlotFailure:
    """The error of a request whose grammar could not be compiled: a fault of the request or of the model's files.

    The caller has checked the grammar, but this process may come to another result.
    """
    if not isinstance(error, WeftError):
        return SlotFailure(FAILED, f"the grammar cannot be compiled: {error!s:.300}", PARAM)
    at_fault = (error.param or PARAM) if isinstance(error, RequestError) else ""
    return SlotFailure(error.code, str(error), at_fault)


def _rows(step: EngineStep) -> int:
    """Number of rows of a step, in the attention group that has the most."""
    return max(len(plan.slots) for plan in step.plans) if isinstance(step, LockStep) else len(step.slots)


def create_scheduler(
    plan: Plan, num_blocks: int, config: EngineConfig, group: int, grammars: Grammars | None = None
) -> Scheduler:
    """The scheduler of an attention group, with the plan's limits and the config's policies.

    All groups together queue as many requests as the config says.
    """
    settings = SchedulerSettings(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_queued=(config.max_num_queued_reqs + group) // plan.data_parallel,
        max_model_len=plan.max_model_len,
        stages=plan.stages,
        policy=config.scheduling_policy,
        lookahead=plan.lookahead,
        speculation=plan.speculation,
    )
    caching = config.enable_prefix_caching
    kv = KVManager(plan.kv_layout, num_blocks, max_num_seqs=plan.max_num_seqs, caching=caching)
    return Scheduler(settings, kv, grammars)
