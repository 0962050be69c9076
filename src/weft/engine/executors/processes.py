"""ProcessExecutor: one process per rank, with a socket to each."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence

from weft.engine.executors.messages import Launch, Listening, ToRank
from weft.engine.executors.rank import WORKER
from weft.engine.executors.rank_processes import NodeWirings, RankProcesses, rank_environment
from weft.engine.executors.rank_watch import RankWatch
from weft.engine.executors.ranks import RankExecutor
from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.forks import can_fork
from weft.engine.processes.launch import child_environment
from weft.engine.processes.liveness import Alive
from weft.errors import Cause, EngineError
from weft.plan.plan import Plan
from weft.plan.wiring import File, Network, Rendezvous, Tcp, Wiring

LOOPBACK, LOOPBACK_ADDRESS = "lo0" if sys.platform == "darwin" else "lo", "127.0.0.1"


def start_server(plan: Plan) -> ForkClient | None:
    """Start a fork server for the ranks of a plan, on this machine; None if it cannot fork."""
    environment = child_environment(rank_environment(plan.threads(0), plan.peer_to_peer, interface=LOOPBACK))
    return ForkClient(environment) if can_fork(environment) else None


class ProcessExecutor(RankExecutor):
    """Runs each rank as a child process. `worker` is the class that each rank runs, as "module:Class".

    With `network`, ranks share no file: they find each other over TCP, and exchange tensors through sockets only, as
    ranks on several machines do. With `stall_s`, a rank that shows no sign of life for `stall_s` seconds has failed. So
    has the engine if a step, a command or the start makes no progress for as long.
    """

    def __init__(self, worker: str = WORKER, *, network: bool = False, stall_s: float | None = None) -> None:
        super().__init__(worker)
        self._network = network
        self._processes = RankProcesses(self._take_message, self._lose_rank)
        self._watch: RankWatch | None = None
        if stall_s is not None:
            self._watch = RankWatch(self._processes, stall_s, self._oldest_work, self._lose_rank)
        self._folder: str | None = None

    @property
    def state(self) -> Alive:
        """Signs of life of the ranks together."""
        return self._watch.state if self._watch else Alive()

    def _launch(self, plan: Plan) -> None:
        if self._watch:
            self._watch.start()
        if plan.on_cpu:  # forks that use a GPU are not tried yet
            self._processes.prepare_forks(self._environment(plan, 0), len(plan.ranks_of(0)))
        if self._network:
            self._launch_on_network(plan)
        else:
            self._launch_on_host(plan)

    def _launch_on_network(self, plan: Plan) -> None:
        """Start the processes; tell the other ranks' processes where rank 0 listens."""
        for place in plan.places:
            self._start_rank(plan, place.rank)
        self._send_launch(plan, 0, Tcp(LOOPBACK_ADDRESS, 0), Network())
        (listening,) = self._await_reports(Listening, 1)
        for place in plan.places[1:]:
            self._send_launch(plan, place.rank, listening.address, Network())

    def _launch_on_host(self, plan: Plan) -> None:
        """Start processes that share files of this host."""
        rendezvous, store_files = self._open_store()
        try:
            with NodeWirings(plan) as wirings:
                for rank, files in wirings.files.items():
                    self._start_rank(plan, rank, [*store_files, *files])
                    self._send_launch(plan, rank, rendezvous, wirings.wirings[rank])
        finally:
            for descriptor in store_files:
                os.close(descriptor)

    def _environment(self, plan: Plan, rank: int) -> dict[str, str]:
        """Variables that are added to a rank's environment."""
        return rank_environment(plan.threads(rank), plan.peer_to_peer, interface=LOOPBACK)

    def _start_rank(self, plan: Plan, rank: int, files: Sequence[int] = ()) -> None:
        """Start the process of a rank, which inherits `files`, and listen to it."""
        if self._ended:  # at the same time, in another thread
            raise EngineError(self._ended)
        self._processes.start(rank, self._environment(plan, rank), files)

    def _send_launch(self, plan: Plan, rank: int, rendezvous: Rendezvous, wiring: Wiring) -> None:
        self._processes.send(Launch(plan, rank, self._worker, rendezvous, wiring), [rank])

    def _open_store(self) -> tuple[File, list[int]]:
        """Return the file through which torch's ranks find each other, and the descriptors behind its path.

        If the system has anonymous files, no trace of the file is left, however this process ends.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("weft-ranks")
            return File(f"/proc/self/fd/{file}"), [file]
        self._folder = tempfile.mkdtemp(prefix="weft-")  # readable by its owner only
        return File(f"{self._folder}/ranks"), []

    def _send(self, message: ToRank, ranks: Iterable[int]) -> None:
        self._processes.send(message, ranks)

    def _lose_rank(self, cause: Cause) -> None:
        """Handle the end of a rank's process, or of its stream."""
        self._fail(cause)

    def _kill(self) -> None:
        self._processes.kill()

    def _end(self) -> None:
        if self._watch:
            self._watch.stop()
        self._processes.end()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
