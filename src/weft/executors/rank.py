"""The life of one rank: start, load, allocate, steps. The same in a thread and in a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from weft.core.step import StepPlan, StepResult
from weft.executors.base import Command
from weft.executors.causes import cause_of, lost_peer
from weft.executors.messages import Alive, Allocate, Allocated, Done, Entered, Failed, Loaded, Run
from weft.planner.memory import Capacity

WORKER = "weft.worker.worker:Worker"

# How often an OpenMP thread looks before it sleeps, read when torch is imported: about 40 us. Its own default is
# 300,000 times, which on cores that others want as well turns a step of 8 ms into one of 200.
SPINS, SPIN_COUNT = "GOMP_SPINCOUNT", "3000"


class Worker(Protocol):
    """What a rank does. Made as `Worker(plan, rank, links)`; all calls come from one thread, in this order."""

    def load(self) -> Capacity: ...

    def allocate(self, num_blocks: int) -> None: ...

    def execute(self, step: StepPlan) -> StepResult | None:
        """The result on the output rank, None on the others."""
        ...

    def close(self) -> None: ...


def run(rank: int, inbox: SimpleQueue[Any], send: Callable[[msgspec.Struct], None], make: Callable[[], Worker]) -> None:
    """Obey what comes in until None does. Whatever goes wrong is the last message, with its cause."""
    phase = "start"

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        send(Entered(name))

    try:
        worker = make()
        enter("load")
        send(Loaded(worker.load()))
        while (message := inbox.get()) is not None:
            match message:
                case Run(step):
                    result = worker.execute(step)
                    if result is not None:
                        send(Done(result))
                case Allocate(num_blocks):
                    enter("allocate")
                    worker.allocate(num_blocks)
                    enter("step")
                    send(Allocated())
                case Command("ping"):
                    send(Alive())
        worker.close()
    except BaseException as error:  # SystemExit too: a rank has no other way to end
        send(Failed(cause_of(error, rank, phase), lost_peer(error)))


def worker_class(name: str) -> Callable[..., Worker]:
    """The class behind "module:Class": this room does not import torch, the class's module does."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Worker] = getattr(import_module(module), attribute)
    return found


def keep_to(cores: tuple[int, ...]) -> None:
    """Bind this thread, and all that it starts, to its share of the host's cores, as far as they are ours."""
    if hasattr(os, "sched_setaffinity") and (ours := os.sched_getaffinity(0).intersection(cores)):
        os.sched_setaffinity(0, ours)
