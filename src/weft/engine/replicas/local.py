"""LocalEngine: the core in a thread of this process, for any number of calling threads.

Only the core is local: its ranks may be processes, or run on other nodes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from weft.config import EngineConfig
from weft.engine.core.commands import Command, Replies, ResetPrefixCache
from weft.engine.core.engine import EngineCore
from weft.engine.core.request import Output, Request, Stats
from weft.engine.executors import create_executor
from weft.engine.executors.base import StartResult
from weft.engine.executors.rank import WORKER
from weft.engine.executors.ranks import CLOSED
from weft.engine.processes.causes import cause_of
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.loop import CoreLoop
from weft.engine.replicas.running import RunningReplica
from weft.engine.structured.compiler import GrammarCompiler
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError, WeftError
from weft.plan.memory import capacity_lines, fit_length
from weft.plan.plan import Plan
from weft.planner.execution.replicas import ReplicaPlan

log = logging.getLogger("weft")

T = TypeVar("T")


class LocalEngine:
    """An engine that has started.

    `plan` is the plan in use; its max_model_len is lowered to what the KV cache can hold (`fit_length`). Every rank has
    `num_blocks` KV blocks and reported one of `capacities`. `host` is the machine as probed before the start. `nodes`:
    the machines that run the ranks; None for this machine alone. `grammars` compiles the requests' grammars; it is the
    same object that the frontend uses.

    One thread owns the core and steps it. Every method may be called from any thread: the requests of all callers
    share the steps.
    """

    def __init__(
        self, config: EngineConfig, planned: ReplicaPlan, nodes: EngineNodes | None, grammars: GrammarCompiler
    ) -> None:
        plan, self.host, _ = planned
        kind = config.executor or ("inline" if len(plan.places) == 1 else "processes")
        self._executor = create_executor(kind, WORKER, nodes.take_first() if nodes else None)
        try:
            ready = self._executor.start(plan)
            self.num_blocks, self.capacities = ready.num_blocks, ready.ranks
            self.plan: Plan = msgspec.structs.replace(plan, max_model_len=fit_length(plan, ready.num_blocks))
            core = EngineCore.from_plan(self.plan, ready.num_blocks, self._executor, config, grammars=grammars)
        except BaseException:
            self._executor.close()
            raise
        for line in capacity_lines(plan, ready.num_blocks):
            log.info(line)
        self._closing = threading.RLock()
        self._loop = CoreThread(core)
        # So that a rank that dies while nothing runs is noticed too.
        self._executor.failure.add_done_callback(lambda failure: self._loop.send_failure(failure.result()))

    @property
    def failure(self) -> EngineError | None:
        """The error that ended the engine; None while it runs."""
        return self._loop.failure

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Queue requests. The Submission iterates over their outputs until the last request has ended.

        Requests beyond the queue's limit are added as room appears. Raises EngineError.
        """
        submission = Submission(self._loop, requests)
        self._loop.send(submission)
        return submission

    @property
    def replicas(self) -> list[RunningReplica]:
        """The engines that run: this one."""
        return [RunningReplica(self.plan, StartResult(num_blocks=self.num_blocks, ranks=self.capacities))]

    def stats(self) -> Stats:
        """Return the core's stats after everything that this thread has sent to it. Raises EngineError."""
        return self._loop.query(lambda core: core.stats())

    def call(self, command: Command | ResetPrefixCache) -> Replies:
        """Have the ranks execute a command between two steps; return their replies.

        Raises RequestError and EngineError.
        """
        return self._loop.query(lambda core: core.call(command)).result()

    def call_each(self, command: Command | ResetPrefixCache) -> list[tuple[RunningReplica, Replies]]:
        """Like `call`; a list of (engine, replies), for callers that also handle several replicas."""
        return [(self.replicas[0], self.call(command))]

    def close(self) -> None:
        """End the core and every rank; callers in flight get an EngineError. May be called twice, by any thread."""
        with self._closing:
            self._loop.send_failure(CLOSED)
            self._executor.close()
            self._loop.join()


class Submission:
    """The requests of one call. Iterated and aborted by one thread at a time."""

    def __init__(self, loop: CoreThread, requests: Iterable[Request]) -> None:
        self.waiting = deque(requests)  # the core's thread takes requests from here as the queue has room
        self.outputs: SimpleQueue[list[Output] | WeftError] = SimpleQueue()
        self._open = {request.id for request in self.waiting}
        self._loop = loop

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs as the steps bring them. Raises RequestError and EngineError."""
        while self._open:
            received = self.outputs.get()
            if not isinstance(received, list):
                self.close()
                raise received
            for output in received:
                if output.id not in self._open:  # aborted while this output was under way
                    continue
                if output.finish_reason is not None:
                    self._open.discard(output.id)
                yield output

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; they get no more outputs."""
        dropped = self._open.intersection(ids)
        if dropped and self._loop.failure is None:  # if the engine has ended, so have all requests
            with contextlib.suppress(EngineError):
                self._loop.send(DropRequests(self, dropped))
        self._open -= dropped

    def close(self) -> None:
        """Abort all requests that have not ended."""
        self.abort(list(self._open))


@dataclass(slots=True)
class DropRequests:
    """Message to forget requests of a submission."""

    submission: Submission
    ids: set[str]


@dataclass(slots=True)
class Query:
    """Message to call a function with the core, between steps."""

    function: Callable[[EngineCore], Any]
    result: Future[Any]


class CoreThread(CoreLoop):
    """The core's loop in a thread. `failure` is the error that ended it, None while it runs."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core, SimpleQueue())
        self.failure: EngineError | None = None
        self._lock = threading.Lock()  # so that no message enters the inbox after the thread has ended
        self._submission_of_request: dict[str, Submission] = {}  # by id of each request that the core has
        self._feeding: deque[Submission] = deque()  # submissions with requests that wait for room
        self._heap = CallersHeap()
        self._thread = threading.Thread(target=self._serve, name="weft-core", daemon=True)
        self._thread.start()

    def send(self, message: Submission | DropRequests | Query) -> None:
        """Hand a message to the thread. Raises EngineError once it has ended."""
        with self._lock:
            if self.failure is not None:
                raise EngineError(self.failure.cause)
            self.inbox.put(message)

    def query(self, function: Callable[[EngineCore], T]) -> T:
        """Have the thread call a function with the core, and return its result.

        Raises EngineError, and the RequestError of the function.
        """
        result: Future[T] = Future()
        self.send(Query(function, result))
        return result.result()

    def send_failure(self, cause: Cause) -> None:
        """End the thread; all waiting callers get the cause.

        Needs no lock: a cause in the inbox of an ended thread is ignored.
        """
        self.inbox.put(cause)

    def join(self) -> None:
        """Wait until the thread has ended.

        A finalised LLM may call this from the core's own thread; a thread cannot join itself.
        """
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        try:
            self.step_until_failure()
        except Exception as error:
            self._end(cause_of(error, CORE, "step"))

    def _handle_event(self, event: Any) -> None:
        match event:
            case Submission():
                self._feeding.append(event)
            case DropRequests(submission, ids):
                self.core.abort(ids)
                for id in ids:
                    self._submission_of_request.pop(id, None)
                submission.waiting = deque(request for request in submission.waiting if request.id not in ids)
            case Query(function, result):
                try:
                    result.set_result(function(self.core))
                except RequestError as error:
                    result.set_exception(error)
            case Cause():
                raise EngineError(event)

    def _pump(self) -> None:
        self._feed()
        self._heap.set_busy(bool(self._submission_of_request))
        super()._pump()

    def _feed(self) -> None:
        """Add waiting requests to the core while the queue has room.

        Submissions take turns, so that a long list of requests does not keep others out.
        """
        while self._feeding:
            submission = self._feeding[0]
            if submission.waiting:
                try:
                    self.core.add(submission.waiting[0])
                except QueueFullError:
                    return
                except RequestError as error:
                    submission.waiting.clear()
                    submission.outputs.put(error)
                else:
                    self._submission_of_request[submission.waiting.popleft().id] = submission
            self._feeding.popleft()
            if submission.waiting:
                self._feeding.append(submission)

    def _deliver(self, outputs: list[Output]) -> None:
        """Pass all outputs of a step to each caller in one piece."""
        shares: dict[Submission, list[Output]] = {}
        for output in outputs:
            ended = output.finish_reason is not None
            submission = self._submission_of_request.pop(output.id) if ended else self._submission_of_request[output.id]
            shares.setdefault(submission, []).append(output)
        # Unfreeze the caller's objects (CallersHeap) before waking callers.
        self._heap.set_busy(bool(self._submission_of_request))
        for submission, share in shares.items():
            submission.outputs.put(share)

    def _end(self, cause: Cause) -> None:
        """Pass the cause to all waiting callers, and to later ones."""
        self._heap.set_busy(False)
        with self._lock:
            self.failure = EngineError(cause)
        submissions = {*self._submission_of_request.values(), *self._feeding}
        with contextlib.suppress(Empty):
            while True:
                match self.inbox.get_nowait():
                    case Submission() as submission:
                        submissions.add(submission)
                    case Query(_, result):
                        result.set_exception(EngineError(cause))
        for submission in submissions:
            submission.outputs.put(EngineError(cause))
        self.core.commands.fail(EngineError(cause))


class CallersHeap:
    """Keeps full garbage collections short while requests run.

    A full collection looks through every object of the process, most of them torch's: 80 ms and more, in which no step
    is scheduled. A process of our own freezes its heap for good. In the caller's process that must not happen: frozen
    garbage in reference cycles is never freed. So the objects that exist when the first request comes are frozen until
    the last request has ended, then unfrozen. A heap that somebody else has frozen is left alone.
    """

    def __init__(self) -> None:
        self._busy = False
        self._frozen = False

    def set_busy(self, busy: bool) -> None:
        """Freeze the heap when work begins and unfreeze it when all work has ended."""
        if busy == self._busy:
            return
        self._busy = busy
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        elif busy and not gc.get_freeze_count():
            gc.freeze()
            self._frozen = True
