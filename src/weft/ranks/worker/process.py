"""The process of one rank: `python -m weft.worker.process FD LIFELINE`, started by the processes executor."""

from __future__ import annotations

import signal
import sys

import msgspec

from weft import logs
from weft.engine.executors.messages import Allocated, CommandDone, ToRank
from weft.engine.executors.rank import RankWorker, bind_to_cores, freeze_start, gc_paused, run_rank, worker_class
from weft.engine.executors.rendezvous import join_rendezvous
from weft.engine.processes.launch import Parent
from weft.engine.processes.liveness import Alive
from weft.machine.native import build


def main(descriptor: int, lifeline: int) -> None:
    """Run one rank, until its parent ends it. `descriptor` is its socket, `lifeline` the parent's death pipe."""
    # Before torch is imported: from here on this process ends with its parent.
    parent: Parent[ToRank] = Parent(descriptor, ToRank, lifeline)
    logs.configure()
    launch = parent.inbox.get()

    def create_worker() -> RankWorker:
        # Before torch starts its threads, which inherit the affinity.
        bind_to_cores(launch.plan.cores[launch.rank])
        listener = join_rendezvous(launch, parent.send)
        with gc_paused():
            from weft.ranks.comm.connect import Site, connect_rank

        worker = worker_class(launch.worker)
        links = connect_rank(Site(launch.plan, launch.rank, launch.wiring, launch.rendezvous, listener))
        return worker(launch.plan, launch.rank, links)

    def send(message: msgspec.Struct) -> None:
        if isinstance(message, Allocated | CommandDone):
            freeze_start()  # what a start or a wake-up creates stays
        parent.send(message)

    steps = 0

    def note_step() -> None:
        nonlocal steps
        steps += 1

    parent.sign = lambda: Alive(steps=steps, computes=build.compiling.is_set())
    run_rank(launch.rank, parent.inbox, send, create_worker, note_step)
    # The rank has failed and has reported its cause. Its parent ends it: a connection that breaks before that would
    # make the other ranks fail as well.
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
