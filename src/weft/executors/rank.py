"""The life of one rank: start, load, allocate, steps. The same in a thread and in a process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from weft.core.step import StepPlan, StepResult
from weft.executors.causes import cause_of, lost_peer
from weft.executors.messages import (
    Allocate,
    Allocated,
    CaptureGraph,
    Done,
    Entered,
    Failed,
    GraphCaptured,
    Loaded,
    Run,
)
from weft.plan.memory import Capacity

WORKER = "weft.worker.worker:Worker"

# How often an OpenMP thread looks before it sleeps, read when torch is imported: about 40 us. Its own default is
# 300,000 times, which on cores that others want as well turns a step of 8 ms into one of 200.
SPINS, SPIN_COUNT = "GOMP_SPINCOUNT", "3000"


class RankWorker(Protocol):
    """What a rank does. Made as `Worker(plan, rank, links)`; all calls come from one thread, in this order."""

    def load(self) -> Capacity: ...

    def allocate(self, num_blocks: int) -> int:
        """Returns the number of CUDA graphs that are left to be captured while no request runs."""
        ...

    def capture_graph(self) -> int:
        """Capture one of them; returns the number that is left."""
        ...

    def execute(self, step: StepPlan) -> StepResult | Callable[[], StepResult] | None:
        """The result on the output rank, None on the others. Where a device still works on it, a function that waits
        for it, and may be called from another thread: the next step need not wait."""
        ...

    def close(self) -> None: ...


def run(
    rank: int, inbox: SimpleQueue[Any], send: Callable[[msgspec.Struct], None], make: Callable[[], RankWorker]
) -> None:
    """Obey what comes in until None does. Whatever goes wrong is the last message, with its cause."""
    phase = "start"
    speaking = threading.Lock()

    def say(message: msgspec.Struct) -> None:
        with speaking:
            send(message)

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        say(Entered(name))

    def fail(error: BaseException) -> None:
        say(Failed(cause_of(error, rank, phase), lost_peer(error)))

    later = Later(lambda result: say(Done(result)), fail)
    try:
        worker = make()
        enter("load")
        say(Loaded(worker.load()))
        while (message := inbox.get()) is not None:
            match message:
                case Run(step):
                    result = worker.execute(step)
                    if result is not None:
                        later.put(result)
                case Allocate(num_blocks):
                    enter("allocate")
                    uncaptured = worker.allocate(num_blocks)
                    enter("step")
                    say(Allocated(uncaptured))
                case CaptureGraph():
                    say(GraphCaptured(worker.capture_graph()))
        later.close()
        worker.close()
    except BaseException as error:  # SystemExit too: a rank has no other way to end
        fail(error)


class Later:
    """Hands results on in the order of their steps. The first that a device still works on starts a thread, which waits
    for it; from then on all go through there, for none may overtake one that is waited for."""

    def __init__(self, done: Callable[[StepResult], None], fail: Callable[[BaseException], None]) -> None:
        self._done, self._fail = done, fail
        self._queue: SimpleQueue[StepResult | Callable[[], StepResult] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, result: StepResult | Callable[[], StepResult]) -> None:
        if self._thread is None:
            if isinstance(result, StepResult):
                self._done(result)
                return
            self._thread = threading.Thread(target=self._run, name="weft-results", daemon=True)
            self._thread.start()
        self._queue.put(result)

    def close(self) -> None:
        """Wait for those that are under way."""
        if self._thread:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            while (result := self._queue.get()) is not None:
                self._done(result if isinstance(result, StepResult) else result())
        except BaseException as error:
            self._fail(error)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While torch is imported: what is made then stays, and Python would look through it for garbage again and again,
    which takes a tenth of the import. Afterwards all there is counts as old."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if collecting:
            gc.enable()


def worker_class(name: str) -> Callable[..., RankWorker]:
    """The class behind "module:Class": this room does not import torch, the class's module does."""
    module, _, attribute = name.partition(":")
    found: Callable[..., RankWorker] = getattr(import_module(module), attribute)
    return found


def keep_to(cores: tuple[int, ...]) -> None:
    """Bind this thread, and all that it starts, to its share of the host's cores, as far as they are ours."""
    if hasattr(os, "sched_setaffinity") and (ours := os.sched_getaffinity(0).intersection(cores)):
        os.sched_setaffinity(0, ours)
