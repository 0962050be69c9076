"""LocalEngine: the core in a thread of this process, for any number of calling threads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from weft.client.heap import CallersHeap
from weft.client.loop import CoreLoop
from weft.config import EngineConfig
from weft.core.engine import EngineCore
from weft.core.request import Output, Request, Stats
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError, WeftError
from weft.executors import create
from weft.executors.causes import cause_of
from weft.executors.ranks import CLOSED
from weft.formats.checkpoint import Checkpoint
from weft.hardware.host import probe_host
from weft.plan.memory import capacity_lines, fit_length
from weft.plan.plan import Plan
from weft.planner.execution import plan_to_run

log = logging.getLogger("weft")

T = TypeVar("T")


class LocalEngine:
    """An engine that has started. `plan` is the executed plan, with the served length; every rank has `num_blocks`
    KV blocks and reported one of `capacities`; `host` is the machine as it was before the start.

    One thread owns the core and steps it. Every method may be called from any thread: the requests of all callers
    share the steps.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.host = probe_host()
        plan = plan_to_run(config, checkpoint, self.host)
        kind = config.executor or ("inline" if len(plan.places) == 1 else "processes")
        self._executor = create(kind)
        try:
            ready = self._executor.start(plan)
            self.num_blocks, self.capacities = ready.num_blocks, ready.ranks
            self.plan: Plan = msgspec.structs.replace(plan, max_model_len=fit_length(plan, ready.num_blocks))
            core = EngineCore.start(self.plan, ready.num_blocks, self._executor, config)
        except BaseException:
            self._executor.close()
            raise
        for line in capacity_lines(plan, ready.num_blocks):
            log.info(line)
        self._closing = threading.RLock()
        self._loop = CoreThread(core)
        # A rank that dies while nothing runs is noticed too.
        self._executor.failure.add_done_callback(lambda failure: self._loop.tell_failure(failure.result()))

    @property
    def failure(self) -> EngineError | None:
        """Why the engine has ended, once it has."""
        return self._loop.failure

    def submit(self, requests: Sequence[Request]) -> Run:
        """Queue requests. The Run iterates over what the steps bring, until the last request has ended; requests
        beyond the queue's limit are added as room appears. Raises EngineError."""
        run = Run(self._loop, requests)
        self._loop.send(run)
        return run

    def stats(self) -> Stats:
        """The core after everything that this thread has asked of it. Raises EngineError."""
        return self._loop.ask(lambda core: core.stats())

    def close(self) -> None:
        """End the core and every rank; callers in flight get an EngineError. May be called twice, by any thread."""
        with self._closing:
            self._loop.tell_failure(CLOSED)
            self._executor.close()
            self._loop.join()


class Run:
    """The requests of one caller. Iterated and aborted by one thread at a time."""

    def __init__(self, loop: CoreThread, requests: Iterable[Request]) -> None:
        self.waiting = deque(requests)  # the core's thread takes them from here as the queue has room
        self.news: SimpleQueue[list[Output] | WeftError] = SimpleQueue()
        self._open = {request.id for request in self.waiting}
        self._loop = loop

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs as the steps bring them. Raises RequestError and EngineError."""
        while self._open:
            news = self.news.get()
            if not isinstance(news, list):
                self.close()
                raise news
            for output in news:
                if output.id not in self._open:  # aborted since
                    continue
                if output.finish_reason is not None:
                    self._open.discard(output.id)
                yield output

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; nothing more comes for them."""
        dropped = self._open.intersection(ids)
        if dropped:
            with contextlib.suppress(EngineError):  # all requests have ended then
                self._loop.send(Drop(self, dropped))
        self._open -= dropped

    def close(self) -> None:
        """Abort all requests that have not ended."""
        self.abort(list(self._open))


@dataclass(slots=True)
class Drop:
    """Requests of a run that are to be forgotten."""

    run: Run
    ids: set[str]


@dataclass(slots=True)
class Ask:
    """A question about the core, answered between steps."""

    question: Callable[[EngineCore], Any]
    answer: Future[Any]


class CoreThread(CoreLoop):
    """The loop in its thread. `failure` is why it has ended, None while it lives."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core, SimpleQueue())
        self.failure: EngineError | None = None
        self._lock = threading.Lock()  # nothing comes into the inbox of a thread that has ended
        self._homes: dict[str, Run] = {}  # of the requests that the core has
        self._feeding: deque[Run] = deque()  # runs with requests that wait for room
        self._heap = CallersHeap()
        self._thread = threading.Thread(target=self._serve, name="weft-core", daemon=True)
        self._thread.start()

    def send(self, message: Run | Drop | Ask) -> None:
        """Hand a message to the thread. Raises EngineError once it has ended."""
        with self._lock:
            if self.failure is not None:
                raise EngineError(self.failure.cause)
            self.inbox.put(message)

    def ask(self, question: Callable[[EngineCore], T]) -> T:
        """Have a question answered by the thread. Raises EngineError."""
        answer: Future[T] = Future()
        self.send(Ask(question, answer))
        return answer.result()

    def tell_failure(self, cause: Cause) -> None:
        """End the thread; whoever waits gets the cause. Without effect on one that has ended."""
        self.inbox.put(cause)

    def join(self) -> None:
        """Wait until the thread has ended. The garbage collector may call this on the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        try:
            self.step_until_failure()
        except Exception as error:
            self._end(cause_of(error, CORE, "step"))

    def _take(self, event: Any) -> None:
        match event:
            case Run():
                self._feeding.append(event)
            case Drop(run, ids):
                self.core.abort(ids)
                for id in ids:
                    self._homes.pop(id, None)
                run.waiting = deque(request for request in run.waiting if request.id not in ids)
            case Ask(question, answer):
                answer.set_result(question(self.core))
            case Cause():
                raise EngineError(event)

    def _pump(self) -> None:
        self._feed()
        self._heap.set_busy(bool(self._homes))
        super()._pump()

    def _feed(self) -> None:
        """Add what waits, as far as the queue has room. Runs take turns: a long list does not keep others out."""
        while self._feeding:
            run = self._feeding[0]
            if run.waiting:
                try:
                    self.core.add(run.waiting[0])
                except QueueFullError:
                    return
                except RequestError as error:
                    run.waiting.clear()
                    run.news.put(error)
                else:
                    self._homes[run.waiting.popleft().id] = run
            self._feeding.popleft()
            if run.waiting:
                self._feeding.append(run)

    def _deliver(self, outputs: list[Output]) -> None:
        """Give each caller what a step has brought for it, in one piece."""
        shares: dict[Run, list[Output]] = {}
        for output in outputs:
            ended = output.finish_reason is not None
            run = self._homes.pop(output.id) if ended else self._homes[output.id]
            shares.setdefault(run, []).append(output)
        self._heap.set_busy(bool(self._homes))  # a caller whose answer is complete finds its heap as it was
        for run, share in shares.items():
            run.news.put(share)

    def _end(self, cause: Cause) -> None:
        """Tell everyone who waits, and everyone who comes, why there will be nothing more."""
        self._heap.set_busy(False)
        with self._lock:
            self.failure = EngineError(cause)
        runs = {*self._homes.values(), *self._feeding}
        with contextlib.suppress(Empty):
            while True:
                match self.inbox.get_nowait():
                    case Run() as run:
                        runs.add(run)
                    case Ask(_, answer):
                        answer.set_exception(EngineError(cause))
        for run in runs:
            run.news.put(EngineError(cause))
