"""RankExecutor: the part of an executor that does not depend on where its ranks run.

It starts the ranks phase by phase, keeps the steps in flight in order, and finds the rank that failed first.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from weft.engine.core.commands import CaptureGraph, GraphsLeft, RankCommand, Replies, Reply
from weft.engine.core.step import EngineStep, LockStep, LockStepResult, StepPlan, StepResult
from weft.engine.executors.base import StartResult
from weft.engine.executors.messages import (
    Allocate,
    Allocated,
    Capturing,
    CommandDone,
    FromRank,
    Listening,
    Loaded,
    Loading,
    PhaseEntered,
    RankFailed,
    RunCommand,
    RunStep,
    StepDone,
    ToRank,
)
from weft.engine.executors.rank import WORKER
from weft.engine.executors.reading import CapturingProgress, ReadingProgress
from weft.engine.executors.start_phases import StartPhases
from weft.engine.processes.liveness import STEP, Work
from weft.errors import CORE, Cause, EngineError, WeftError
from weft.machine.native import build
from weft.plan.backends import ATTENTION_BACKENDS, AttentionSpec, KernelDevice
from weft.plan.memory import kv_blocks
from weft.plan.plan import Plan

Report = TypeVar("Report", Listening, Loaded, Allocated)

# A rank that lost a peer may report so before the peer's own end is noticed: wait this long for the root cause.
ROOT_CAUSE_S = 1.0
CLOSED = Cause(
    rank=CORE,
    phase="shutdown",
    code="engine-closed",
    cause="the engine was closed; the requests that ran were ended",
)
IDLE_S = 0.1  # after this many seconds without a step, no request runs or waits


PHASE_CHARACTERS = 40  # of a phase that a rank names
OTHER_CODE = "install the same Weft on all nodes; if it is, this is a bug, or that node is not to be trusted"
BUSY_SHARE = 0.1  # of the time, at most, that captures take while steps run


class UnexpectedMessageError(WeftError):
    """A message that a rank of this version does not send at this time."""

    def __init__(self, message: object) -> None:
        super().__init__(
            f"sent a message that was not asked for, or with impossible values ({type(message).__name__})",
            code="unexpected-message",
        )


@dataclass(eq=False)
class PendingStep:
    """A step that ranks are executing, and the results so far, by attention group."""

    step: EngineStep
    future: Future[Any] = field(default_factory=Future)
    results: dict[int, StepResult] = field(default_factory=dict)


@dataclass(eq=False)
class PendingCall:
    """A command that ranks are executing, and the replies so far, by rank."""

    command: RankCommand
    future: Future[Replies] = field(default_factory=Future)
    replies: dict[int, Reply] = field(default_factory=dict)


class RankExecutor(ABC):
    """An `Executor`; subclasses launch the ranks, send to them and end them.

    `failure` resolves with the first root cause as soon as a rank fails, even if no step is in flight.
    """

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker
        self.failure: Future[Cause] = Future()
        self._phases: list[str] = []
        self._ranks: Sequence[int] = ()
        self._groups: list[list[int]] = []  # ranks of each attention group
        self._group_of: list[int] = []  # attention group of each rank
        self._reports: SimpleQueue[FromRank | Cause] = SimpleQueue()
        # Every rank gets the steps and commands in the same order.
        self._sending = threading.RLock()
        self._lock = threading.Lock()  # guards the attributes below
        self._pending: deque[PendingStep] = deque()
        self._calls: deque[PendingCall] = deque()
        self._heard = 0  # messages of the ranks, each a sign of progress of a start or a command
        self._listening = False  # rank 0 has said where
        self._starting = False  # all ranks have been launched, and `_awaited` are to report the end of a phase
        self._awaited: set[int] = set()
        self._submitted = 0
        self._uncaptured = 0  # CUDA graphs, on the rank that has the most
        self._capturing = False
        self._closing = threading.Event()
        self._ended: Cause | None = None
        self._suspicion: threading.Timer | None = None
        self._cause_comes = False
        self._reading, self._captures = ReadingProgress(), CapturingProgress()
        self._start_phases = StartPhases(0)

    def start(self, plan: Plan) -> StartResult:
        self._phases = ["start"] * len(plan.places)
        self._ranks, self._groups = range(len(plan.places)), plan.attention_groups
        self._group_of = [place.dp_rank for place in plan.places]
        atexit.register(self.close)
        if self._worker == WORKER:
            compile_ahead(plan)
        try:
            self._awaited = set(self._ranks)
            self._start_phases = StartPhases(len(self._ranks))
            self._start_phases.enter("start")
            self._launch(plan)
            self._starting = True
            capacities = sorted((report.capacity for report in self._await_all(Loaded)), key=lambda c: c.rank)
            self._reading.close()
            num_blocks = kv_blocks(plan, capacities)
            self._awaited = set(self._ranks)
            self._send_all(Allocate(num_blocks))
            uncaptured = max(report.uncaptured for report in self._await_all(Allocated))
            self._captures.close()
            self._capture_later(uncaptured)
            self._starting = False
            self._start_phases.close()
        except BaseException:  # after Ctrl-C, too, no rank may be left behind
            self.close()
            raise
        return StartResult(num_blocks=num_blocks, ranks=capacities)

    def submit(self, step: EngineStep) -> Future[Any]:
        pending = PendingStep(step)
        future = pending.future
        future.set_running_or_notify_cancel()
        with self._sending:
            with self._lock:
                ended = self._ended
                if ended is None:
                    self._pending.append(pending)
                    self._submitted += 1
            if ended is None:
                self._send_step(step)
            else:
                future.set_exception(EngineError(ended))
        return future

    def call(self, command: RankCommand) -> Future[Replies]:
        call = PendingCall(command)
        call.future.set_running_or_notify_cancel()
        with self._sending:
            with self._lock:
                ended = self._ended
                if ended is None:
                    self._calls.append(call)
            if ended is None:
                self._send_all(RunCommand(command))
            else:
                call.future.set_exception(EngineError(ended))
        return call.future

    def close(self) -> None:
        self._finish(CLOSED)
        self._end()
        atexit.unregister(self.close)

    def _send_step(self, step: EngineStep) -> None:
        """Send each attention group its plan."""
        if isinstance(step, StepPlan):
            self._send(RunStep(step), self._ranks)
            return
        for plan, ranks in zip(step.plans, self._groups, strict=True):
            self._send(RunStep(plan), ranks)

    def _send_all(self, message: ToRank) -> None:
        """Send a message to every rank that is still there."""
        self._send(message, self._ranks)

    @abstractmethod
    def _launch(self, plan: Plan) -> None:
        """Start all ranks at once. Each reports through `_take_message` or `_fail`, from a thread of its own."""

    @abstractmethod
    def _send(self, message: ToRank, ranks: Iterable[int]) -> None:
        """Send a message to these ranks, as far as they are still there."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all ranks, without waiting."""

    @abstractmethod
    def _end(self) -> None:
        """End all ranks and wait until they are gone. May be called twice, and before `_launch` has returned."""

    def _oldest_work(self) -> Work | None:
        """Return the work that the ranks have had for the longest; None if they have nothing to do."""
        with self._lock:
            if self._pending:
                return Work(STEP, self._pending[0])
            if self._calls:
                call = self._calls[0]
                return Work(call.command.phase, (call, self._heard), set(self._ranks) - call.replies.keys())
            if not self._starting:
                return None
            awaited = set(self._awaited)
            return Work(self._phases[min(awaited, default=0)], (None, self._heard), awaited)

    def _take_message(self, rank: int, message: FromRank) -> None:
        """Handle a message from a rank. A message that was not asked for is a failure of the rank.

        On another machine that rank may run other code. Its messages must neither end the thread that listens to it,
        nor be kept without limit.
        """
        self._heard += 1
        try:
            self._handle_message(rank, message)
        except UnexpectedMessageError as error:
            self._fail(Cause(rank=rank, phase=self._phases[rank], code=error.code, cause=str(error), hint=OTHER_CODE))

    def _handle_message(self, rank: int, message: FromRank) -> None:
        match message:
            case StepDone(result):
                self._take_result(self._group_of[rank], result)
            case CommandDone(reply):
                self._take_reply(rank, reply)
            case Loading(number, done, read) if number == rank:
                self._reading.update(rank, done, read)
                if self._reading.complete(len(self._ranks)):
                    self._start_phases.enter("profile")
            case Capturing(number, done, total) if number == rank:
                self._captures.update(rank, done, total)
            case Listening() if rank == 0 and not self._listening:
                self._listening = True
                self._reports.put(message)
            case Loaded() | Allocated() if rank in self._awaited and _is_possible(rank, message):
                self._awaited.discard(rank)
                self._reports.put(message)
            case PhaseEntered(phase):
                self._phases[rank] = phase[:PHASE_CHARACTERS]
                self._start_phases.enter(phase)
            case RankFailed(cause, lost_peer):
                self._fail(cause, lost_peer)
            case _:
                raise UnexpectedMessageError(message)

    def _take_result(self, group: int, result: StepResult) -> None:
        """Take a group's result of the first step of which it has not returned one."""
        with self._lock:
            if self._ended is not None:
                return
            pending = next((pending for pending in self._pending if group not in pending.results), None)
            if pending is None:
                raise UnexpectedMessageError(result)
            pending.results[group] = result
            if len(pending.results) < len(self._groups):
                return
            self._pending.popleft()  # every group has returned its results of earlier steps
        if isinstance(pending.step, LockStep):
            pending.future.set_result(LockStepResult([pending.results[group] for group in range(len(self._groups))]))
        else:
            pending.future.set_result(result)

    def _take_reply(self, rank: int, reply: Reply) -> None:
        """Take a rank's reply to the first command that it has not replied to."""
        with self._lock:
            if self._ended is not None:
                return
            call = next((call for call in self._calls if rank not in call.replies), None)
            if call is None:
                raise UnexpectedMessageError(reply)
            call.replies[rank] = reply
            if len(call.replies) < len(self._phases):
                return
            self._calls.popleft()  # an earlier call would have ended before
        replies = [call.replies[rank] for rank in range(len(self._phases))]
        if left := [reply.count for reply in replies if isinstance(reply, GraphsLeft)]:
            self._capture_later(max(left))
        call.future.set_result(replies)

    def _fail(self, cause: Cause, lost_peer: bool = False) -> None:
        """Handle the failure of a rank.

        The first failure that is not a lost peer is the root cause, and ends everything. A rank that lost a peer waits
        ROOT_CAUSE_S for the peer's own failure.
        """
        with self._lock:
            if lost_peer:
                if self._suspicion is None and self._ended is None and not self._cause_comes:
                    self._suspicion = threading.Timer(ROOT_CAUSE_S, self._fail, (cause,))
                    self._suspicion.daemon = True
                    self._suspicion.start()
                return
        if self._finish(cause):
            self._kill()
            self.failure.set_result(cause)

    def _expect_cause(self) -> None:
        """Note that a rank has died, and that `_fail` comes with its cause: what other ranks lost by it is none."""
        with self._lock:
            self._cause_comes = True
            if self._suspicion:
                self._suspicion.cancel()

    def _finish(self, cause: Cause) -> bool:
        """Fail all steps in flight, and those to come, with this cause. Returns True for the first call."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = cause
            self._closing.set()
            futures: list[Future[Any]] = [step.future for step in self._pending]
            futures += [call.future for call in self._calls]
            self._pending.clear()
            self._calls.clear()
            if self._suspicion:
                self._suspicion.cancel()
        self._reports.put(cause)
        for future in futures:
            future.set_exception(EngineError(cause))
        return True

    def _capture_later(self, uncaptured: int) -> None:
        """Have the ranks capture `uncaptured` CUDA graphs between later steps."""
        with self._lock:
            self._uncaptured = uncaptured
            if not uncaptured or self._capturing:
                return
            self._capturing = True
        threading.Thread(target=self._capture_missing, name="weft-captures", daemon=True).start()

    def _capture_missing(self) -> None:
        """Have the ranks capture the CUDA graphs that are left, one after the other, when `CapturePace` says so.

        Every rank captures a graph between the same two steps, since all get steps and commands in one order. Steps
        that were submitted before come first, and those after wait.
        """
        submitted, pace = -1, CapturePace(time.monotonic)
        with contextlib.suppress(EngineError):  # reported elsewhere
            while not self._closing.wait(IDLE_S):
                capture = None
                with self._sending:
                    with self._lock:
                        if not self._uncaptured:
                            self._capturing = False
                            return
                        idle = not self._pending and self._submitted == submitted
                        is_due = not self._calls and pace.is_due(idle=idle)
                        submitted = self._submitted
                    if is_due:
                        pace.begin()
                        capture = self.call(CaptureGraph())
                if capture:
                    capture.result()
                    pace.end()

    def _await_all(self, kind: type[Report]) -> list[Report]:
        """Wait for a `kind` from each rank. Raises EngineError with the root cause if a rank fails."""
        return self._await_reports(kind, len(self._phases))

    def _await_reports(self, kind: type[Report], count: int) -> list[Report]:
        """Wait for `count` reports of a `kind`. Raises as `_await_all`."""
        reports: list[Report] = []
        while len(reports) < count:
            report = self._reports.get()
            if isinstance(report, Cause):
                raise EngineError(report)
            if not isinstance(report, kind):
                error = UnexpectedMessageError(report)
                raise EngineError(
                    Cause(rank=CORE, phase="start", code=error.code, cause=f"a rank {error}", hint=OTHER_CODE)
                )
            reports.append(report)
        return reports


def _is_possible(rank: int, message: Loaded | Allocated) -> bool:
    """Return True if a rank's report can be true: the number of KV blocks of all ranks is computed from it."""
    if isinstance(message, Allocated):
        return message.uncaptured >= 0
    capacity = message.capacity
    sizes = (capacity.weight_bytes, capacity.activation_bytes)
    return capacity.rank == rank and capacity.block_bytes > 0 and min(sizes) >= 0


def compile_ahead(plan: Plan) -> None:
    """Compile the CPU kernels, if a rank will need them, while the ranks import torch and read their weights."""
    cpu, spec = ATTENTION_BACKENDS["cpu"], AttentionSpec.from_shape(plan.shape, plan.dtype)
    backends = {plan.rank_backend(rank) for rank, device in enumerate(plan.devices) if device.kind == "cpu"}
    needed = backends & {"auto", "cpu"}
    if needed and cpu.supports(spec, KernelDevice(cards=(), packages=None)) is None:
        # A deterministic plan may need a narrow one, which its ranks compile.
        build.build_ahead(plan.dtype)


class CapturePace:
    """Says when the next graph is captured: at once while no step runs, else so that BUSY_SHARE is kept.

    `clock` gives seconds. Every capture is between `begin` and `end`; no step runs in between.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._next_s = float("-inf")

    def is_due(self, *, idle: bool) -> bool:
        """Return True if a graph is to be captured now."""
        return idle or self._clock() >= self._next_s

    def begin(self) -> None:
        """Note that the ranks have been told to capture a graph, after the steps in flight."""
        self._began_s = self._clock()

    def end(self) -> None:
        """Note that all ranks have captured it."""
        now = self._clock()
        self._next_s = now + (now - self._began_s) * (1 / BUSY_SHARE - 1)
