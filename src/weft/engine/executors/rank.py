"""The life of one rank: start, load, allocate, then steps. The same code runs in a thread and in a process."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from weft.engine.core.commands import RankCommand, Reply
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.executors.messages import (
    Allocate,
    Allocated,
    Capturing,
    CommandDone,
    Loaded,
    Loading,
    PhaseEntered,
    RankFailed,
    RunCommand,
    RunStep,
    StepDone,
)
from weft.engine.processes.causes import cause_of, lost_peer
from weft.engine.processes.fork_server import Fork
from weft.plan.memory import Capacity

WORKER = "weft.ranks.worker.worker:Worker"

# Number of times that an OpenMP thread polls before it sleeps, about 40 us; read when torch is imported. OpenMP's own
# default is 300,000, which on cores that others want as well turns a step of 8 ms into one of 200 ms.
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "3000"


class RankWorker(Protocol):
    """Protocol of the class that a rank runs.

    Constructed as `RankWorker(plan, rank, links)`. All calls come from one thread: `load`, `allocate`, then commands
    and steps in any order, `close`. `report_read` is set before `load`: it gets the bytes that are read so far, and all
    that will be; and so is `report_captured`, for the CUDA graphs that `allocate` captures.
    """

    report_read: Callable[[int, int], None]
    report_captured: Callable[[int, int], None]

    def load(self) -> Capacity: ...

    def allocate(self, num_blocks: int) -> int:
        """Allocate KV blocks. Returns the number of CUDA graphs left to be captured between steps."""
        ...

    def call(self, command: RankCommand) -> Reply:
        """Execute a command."""
        ...

    def execute(self, step: StepPlan) -> StepResult | Callable[[], StepResult] | None:
        """Run a step. Returns the result on the output rank, None on the others.

        If a device still works on the result, returns a function that waits for it. The function may be called from
        another thread, so that the next step need not wait.
        """
        ...

    def close(self) -> None: ...


def run_rank(
    rank: int,
    inbox: SimpleQueue[Any],
    send: Callable[[msgspec.Struct], None],
    create_worker: Callable[[], RankWorker],
    note_step: Callable[[], None] = lambda: None,
) -> None:
    """Execute the messages in `inbox` until None comes. Any failure is sent as the last message, with its cause.

    `note_step` is called after each step.
    """
    phase = "start"
    sending = threading.Lock()

    def send_locked(message: msgspec.Struct) -> None:
        with sending:
            send(message)

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        send_locked(PhaseEntered(name))

    def fail(error: BaseException) -> None:
        send_locked(RankFailed(cause_of(error, rank, phase), lost_peer(error)))

    results = ResultSender(lambda result: send_locked(StepDone(result)), fail)
    try:
        worker = create_worker()
        worker.report_read = lambda done, total: send_locked(Loading(rank, done, total))
        worker.report_captured = lambda done, total: send_locked(Capturing(rank, done, total))
        enter("load")
        send_locked(Loaded(worker.load()))
        while (message := inbox.get()) is not None:
            match message:
                case RunStep(step):
                    result = worker.execute(step)
                    note_step()
                    if result is not None:
                        results.put(result)
                case Allocate(num_blocks):
                    enter("allocate")
                    uncaptured = worker.allocate(num_blocks)
                    enter("step")
                    send_locked(Allocated(uncaptured))
                case RunCommand(command):
                    enter(command.phase)
                    reply = worker.call(command)
                    enter("step")
                    send_locked(CommandDone(reply))
        results.close()
        worker.close()
    except BaseException as error:  # SystemExit too: a rank has no other way to end
        fail(error)


class ResultSender:
    """Passes results on in the order of their steps.

    The first result that a device still works on starts a thread, which waits for it. From then on all results go
    through that thread, since none may overtake one that is waited for.
    """

    def __init__(self, done: Callable[[StepResult], None], fail: Callable[[BaseException], None]) -> None:
        self._done, self._fail = done, fail
        self._queue: SimpleQueue[StepResult | Callable[[], StepResult] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, result: StepResult | Callable[[], StepResult]) -> None:
        if self._thread is None:
            if isinstance(result, StepResult):
                self._done(result)
                return
            self._thread = threading.Thread(target=self._send_results, name="weft-results", daemon=True)
            self._thread.start()
        self._queue.put(result)

    def close(self) -> None:
        """Wait until all results have been passed on."""
        if self._thread:
            self._queue.put(None)
            self._thread.join()

    def _send_results(self) -> None:
        try:
            while (result := self._queue.get()) is not None:
                self._done(result if isinstance(result, StepResult) else result())
        except BaseException as error:
            self._fail(error)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while torch is imported, and count all objects as old afterwards.

    The objects of the import stay. Python would look through them for garbage again and again, a tenth of the import's
    time. If all was imported before, nothing changes, also in a heap that the caller has frozen.
    """
    collecting, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            freeze_start()
            unfreeze_start()
        if collecting:
            gc.enable()


def freeze_start() -> None:
    """Have the collector skip all objects of now: to look through torch's takes 80 ms.

    In a fork those are skipped already, and stay so: a collection would write to every page that ranks share.
    """
    if not Fork.child:
        gc.freeze()


def unfreeze_start() -> None:
    """Undo `freeze_start`: parts of a model may form cycles."""
    if not Fork.child:
        gc.unfreeze()


def worker_class(name: str) -> Callable[..., RankWorker]:
    """Return the class "module:Class", imported by name: unlike this package, its module imports torch."""
    module, _, attribute = name.partition(":")
    worker: Callable[..., RankWorker] = getattr(import_module(module), attribute)
    return worker


def bind_to_cores(cores: tuple[int, ...]) -> None:
    """Bind this thread, and all threads that it starts, to the cores of `cores` that this process may use."""
    if hasattr(os, "sched_setaffinity") and (ours := os.sched_getaffinity(0).intersection(cores)):
        os.sched_setaffinity(0, ours)
