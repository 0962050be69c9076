"""InlineExecutor: ranks as threads of this process, for one rank, for tests and for debugging."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from weft.engine.executors.messages import ToRank
from weft.engine.executors.rank import (
    SPIN_COUNT,
    SPIN_VARIABLE,
    WORKER,
    RankWorker,
    bind_to_cores,
    gc_paused,
    run_rank,
    worker_class,
)
from weft.engine.executors.ranks import RankExecutor
from weft.machine.hardware import cuda
from weft.plan.plan import Plan

END_S = 5.0  # a thread cannot be killed: one that is busy for longer ends when its work is done


class InlineExecutor(RankExecutor):
    """Runs each rank in a thread, even a single rank: a step then runs while the core prepares the next."""

    def __init__(self, worker: str = WORKER) -> None:
        super().__init__(worker)
        self._wiring: Any = None
        self._inboxes: list[SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []

    def _launch(self, plan: Plan) -> None:
        os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)
        os.environ.update(cuda.device_order_variables(os.environ))
        with gc_paused():
            threads = import_module("weft.ranks.comm.threads")  # by name: this package does not import torch
        self._wiring = threads.Threads(plan)
        for place in plan.places:
            inbox: SimpleQueue[Any] = SimpleQueue()
            thread = threading.Thread(
                target=self._run_rank, args=(plan, place.rank, inbox), name=f"weft-rank-{place.rank}", daemon=True
            )
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()

    def _run_rank(self, plan: Plan, rank: int, inbox: SimpleQueue[Any]) -> None:
        def create_worker() -> RankWorker:
            bind_to_cores(plan.cores[rank])
            connect = import_module("weft.ranks.comm.connect")
            links = connect.connect_rank(connect.Site(plan, rank, self._wiring))
            return worker_class(self._worker)(plan, rank, links)

        run_rank(rank, inbox, partial(self._take_message, rank), create_worker)

    def _send(self, message: ToRank, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._inboxes[rank].put(message)

    def _kill(self) -> None:
        # A rank that waits for another is woken, and ends.
        self._wiring.abort()
        for inbox in self._inboxes:
            inbox.put(None)

    def _end(self) -> None:
        if self._wiring:
            self._kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(END_S)
