"""ProcessExecutor: one process per rank, with a socket to each."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from itertools import chain

from weft.errors import EngineError
from weft.executors.causes import cause_of
from weft.executors.forks import Server, pool
from weft.executors.framing import FrameError, encode_frame
from weft.executors.launch import Child, child_environment, end_children
from weft.executors.messages import Failed, FromRank, Launch, Listening, ToRank
from weft.executors.rank import SPIN_COUNT, SPIN_VARIABLE, WORKER
from weft.executors.ranks import RankExecutor
from weft.executors.shared_files import open_shared_memory, shared_descriptors
from weft.hardware import cuda
from weft.plan.plan import Plan
from weft.plan.wiring import File, Network, Rendezvous, SharedMemory, Tcp, Wiring

LOOPBACK, LOOPBACK_ADDRESS = "lo0" if sys.platform == "darwin" else "lo", "127.0.0.1"


class ProcessExecutor(RankExecutor):
    """Runs each rank as a child process. `worker` is the class that each rank runs, as "module:Class".

    With `network`, ranks share no file: they find each other over TCP, and exchange tensors through sockets only, as
    ranks on several machines do.
    """

    def __init__(self, worker: str = WORKER, *, network: bool = False) -> None:
        super().__init__(worker)
        self._network = network
        self._children: list[Child[FromRank]] = []
        self._listeners: list[threading.Thread] = []
        self._folder: str | None = None
        self._server: Server | None = None

    def _launch(self, plan: Plan) -> None:
        if plan.on_cpu:  # forks that use a GPU are not tried yet
            environment = child_environment(rank_environment(plan.threads(0), plan.peer_to_peer))
            self._server = pool.acquire(environment, len(plan.places))
        if self._network:
            self._launch_on_network(plan)
        else:
            self._launch_on_host(plan)

    def _launch_on_network(self, plan: Plan) -> None:
        """Start the processes; tell those of the other ranks where rank 0 listens."""
        for place in plan.places:
            self._start_rank(plan, place.rank)
        self._send_launch(plan, 0, Tcp(LOOPBACK_ADDRESS, 0), Network())
        (listening,) = self._await_reports(Listening, 1)
        for place in plan.places[1:]:
            self._send_launch(plan, place.rank, listening.address, Network())

    def _launch_on_host(self, plan: Plan) -> None:
        """Start processes that share files of this host."""
        rendezvous, store_files = self._open_store()
        wirings = create_wirings(plan)
        opened = [shared_descriptors(wiring) if isinstance(wiring, SharedMemory) else [] for wiring in wirings]
        try:
            for place in plan.places:
                self._start_rank(plan, place.rank, [*store_files, *opened[place.rank]])
                self._send_launch(plan, place.rank, rendezvous, wirings[place.rank])
        finally:
            for descriptor in {*store_files, *chain.from_iterable(opened)}:
                os.close(descriptor)

    def _start_rank(self, plan: Plan, rank: int, files: Sequence[int] = ()) -> None:
        """Start the process of a rank, which inherits `files`, and listen to it."""
        if self._ended:  # meanwhile, in another thread
            raise EngineError(self._ended)
        environment = rank_environment(plan.threads(rank), plan.peer_to_peer)
        child: Child[FromRank] = Child(
            "weft.worker.process", FromRank, env=environment, files=files, server=self._server
        )
        self._children.append(child)
        listener = threading.Thread(target=self._listen, args=(rank, child), name=f"weft-rank-{rank}", daemon=True)
        self._listeners.append(listener)
        listener.start()

    def _send_launch(self, plan: Plan, rank: int, rendezvous: Rendezvous, wiring: Wiring) -> None:
        self._children[rank].send(Launch(plan, rank, self._worker, rendezvous, wiring))

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
        frame = encode_frame(message)
        for rank in ranks:
            self._children[rank].send_frame(frame)

    def _listen(self, rank: int, child: Child[FromRank]) -> None:
        failed = False
        try:
            for message in child.channel:
                failed = isinstance(message, Failed)
                self._take_message(rank, message)
        except FrameError as error:
            self._fail(cause_of(error, rank, self._phases[rank]))
        if not failed:
            self._fail(child.describe_exit().of(rank, self._phases[rank]))

    def _kill(self) -> None:
        for child in list(self._children):
            child.kill()

    def _end(self) -> None:
        end_children(self._children)
        for listener in self._listeners:
            if listener is not threading.current_thread():
                listener.join()
        for child in self._children:
            child.close()
        with self._lock:
            server, self._server = self._server, None
        if server:
            pool.release(server)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def rank_environment(threads: int, peer_to_peer: bool = True) -> dict[str, str]:
    """Environment variables that a rank's libraries read when they are imported. The user's own settings stay."""
    number = str(threads)
    ours = {
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "OPENBLAS_NUM_THREADS": number,
        # All ranks are on this host; gloo would take the interface of the host's name.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        SPIN_VARIABLE: SPIN_COUNT,
        **cuda.device_order_variables(os.environ),
    }
    if not peer_to_peer:
        ours["NCCL_P2P_DISABLE"] = "1"
    return {name: value for name, value in ours.items() if name not in os.environ}


def create_wirings(plan: Plan) -> Sequence[Wiring]:
    """Open what the ranks of one host exchange tensors through, in rank order."""
    if plan.exclusive_gpus or not hasattr(os, "memfd_create"):
        return [Network()] * len(plan.places)
    return open_shared_memory(plan)
