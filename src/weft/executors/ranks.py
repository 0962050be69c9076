"""RankExecutor: what every executor does with its ranks, wherever they run.

It starts them phase by phase, keeps the steps in flight in order, and finds out who failed first.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from weft.core.step import StepPlan, StepResult
from weft.errors import CORE, Cause, EngineError
from weft.executors.base import Ready
from weft.executors.messages import (
    Allocate,
    Allocated,
    CaptureGraph,
    Done,
    Entered,
    Failed,
    FromRank,
    GraphCaptured,
    Loaded,
    Run,
    ToRank,
)
from weft.executors.rank import WORKER
from weft.native import build
from weft.plan.memory import kv_blocks
from weft.plan.plan import Plan

News = TypeVar("News", Loaded, Allocated, GraphCaptured)

# A rank that lost a peer may say so before the peer's own end is seen: so long is the root cause waited for.
ROOT_CAUSE_S = 1.0
CLOSED = Cause(CORE, "shutdown", "the engine was closed; the requests that ran were ended")
IDLE_S = 0.1  # without a step in flight, and no request runs or waits


class RankExecutor(ABC):
    """An `Executor`, but for how ranks are launched, told and ended.

    `failure` resolves with the first root cause as soon as a rank fails, even when no step is in flight.
    """

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker
        self.failure: Future[Cause] = Future()
        self._phases: list[str] = []
        self._news: SimpleQueue[FromRank | Cause] = SimpleQueue()
        self._sending = threading.Lock()  # every rank gets the steps in the same order
        self._lock = threading.Lock()  # of what follows
        self._pending: deque[Future[StepResult]] = deque()
        self._submitted = 0
        self._closing = threading.Event()
        self._ended: Cause | None = None
        self._suspicion: threading.Timer | None = None

    def start(self, plan: Plan) -> Ready:
        self._phases = ["start"] * len(plan.places)
        atexit.register(self.close)
        if self._worker == WORKER:
            compile_ahead(plan)
        try:
            self._launch(plan)
            capacities = sorted((news.capacity for news in self._all(Loaded)), key=lambda c: c.rank)
            num_blocks = kv_blocks(plan, capacities)
            self._tell(Allocate(num_blocks))
            uncaptured = max(news.uncaptured for news in self._all(Allocated))
        except BaseException:  # Ctrl-C too leaves nothing behind
            self.close()
            raise
        if uncaptured:
            threading.Thread(target=self._capture_while_idle, name="weft-captures", daemon=True).start()
        return Ready(num_blocks=num_blocks, ranks=capacities)

    def submit(self, step: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        with self._sending:
            with self._lock:
                ended = self._ended
                if ended is None:
                    self._pending.append(future)
                    self._submitted += 1
            if ended is None:
                self._tell(Run(step))
            else:
                future.set_exception(EngineError(ended))
        return future

    def close(self) -> None:
        self._finish(CLOSED)
        self._end()
        atexit.unregister(self.close)

    @abstractmethod
    def _launch(self, plan: Plan) -> None:
        """Begin all ranks at once. Each reports through `_hear`, or `_fail`, from a thread of its own."""

    @abstractmethod
    def _tell(self, message: ToRank) -> None:
        """Send to every rank; those that are gone are passed over."""

    @abstractmethod
    def _kill(self) -> None:
        """Stop all ranks by force, without waiting."""

    @abstractmethod
    def _end(self) -> None:
        """End all ranks and wait until they are gone. May be called twice, and before `_launch` is through."""

    def _hear(self, rank: int, message: FromRank) -> None:
        """Take in what a rank says."""
        match message:
            case Done(result):
                with self._lock:
                    future = self._pending.popleft() if self._ended is None else None
                if future:
                    future.set_result(result)
            case Loaded() | Allocated() | GraphCaptured():
                self._news.put(message)
            case Entered(phase):
                self._phases[rank] = phase
            case Failed(cause, lost_peer):
                self._fail(cause, lost_peer)

    def _fail(self, cause: Cause, lost_peer: bool = False) -> None:
        """A rank has failed. The first that did so by itself is the root cause and ends everything; one that
        lost a peer has to wait a moment for the peer's own end."""
        with self._lock:
            if lost_peer:
                if self._suspicion is None and self._ended is None:
                    self._suspicion = threading.Timer(ROOT_CAUSE_S, self._fail, (cause,))
                    self._suspicion.daemon = True
                    self._suspicion.start()
                return
        if self._finish(cause):
            self._kill()
            self.failure.set_result(cause)

    def _finish(self, cause: Cause) -> bool:
        """No more results: fail what is in flight. Whether this was the first call."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = cause
            self._closing.set()
            pending = list(self._pending)
            self._pending.clear()
            if self._suspicion:
                self._suspicion.cancel()
        self._news.put(cause)
        for future in pending:
            future.set_exception(EngineError(cause))
        return True

    def _capture_while_idle(self) -> None:
        """Have the ranks capture the CUDA graphs that are left, one after the other, while no step is in flight."""
        submitted, uncaptured = -1, 1
        with contextlib.suppress(EngineError):  # which is told elsewhere
            while uncaptured and not self._closing.wait(IDLE_S):
                with self._sending:
                    with self._lock:
                        idle = not self._pending and self._submitted == submitted
                        submitted = self._submitted
                    if idle:
                        self._tell(CaptureGraph())
                if idle:
                    uncaptured = max(news.uncaptured for news in self._all(GraphCaptured))

    def _all(self, kind: type[News]) -> list[News]:
        """Wait until each rank has said `kind`. Raises EngineError with the root cause where one fails."""
        heard: list[News] = []
        while len(heard) < len(self._phases):
            news = self._news.get()
            if isinstance(news, Cause):
                raise EngineError(news)
            assert isinstance(news, kind)
            heard.append(news)
        return heard


def compile_ahead(plan: Plan) -> None:
    """Have the CPU kernels compiled, where a rank will want them, while it imports torch and reads its weights."""
    wanted = plan.attention_backend in ("auto", "cpu") and "cpu" in plan.devices
    if wanted and build.native_obstacle(plan.dtype, plan.shape.head_dim, plan.shape.group) is None:
        build.build_ahead(plan.dtype)
