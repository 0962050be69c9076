"""ProcessExecutor: one process per rank, a socket to each."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading

from weft.errors import Cause
from weft.executors.framing import FrameError, encode
from weft.executors.launch import Child, end
from weft.executors.messages import Failed, FromRank, Launch, Neighbour, Shared, ToRank
from weft.executors.rank import SPIN_COUNT, SPINS, WORKER
from weft.executors.ranks import RankExecutor
from weft.hardware import cuda
from weft.plan.plan import Plan

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ProcessExecutor(RankExecutor):
    """Ranks are children of this process. `worker` names the class that each one runs, as "module:Class"."""

    def __init__(self, worker: str = WORKER) -> None:
        super().__init__(worker)
        self._children: list[Child[FromRank]] = []
        self._listeners: list[threading.Thread] = []
        self._folder: str | None = None

    def _launch(self, plan: Plan) -> None:
        store, opened = self._store()
        shared = [share(plan.tensor_parallel) for _ in range(plan.stages)]
        # Between each rank and the one of the same place in the stage after it.
        lines = [adjoin() for _ in plan.places[: -plan.tensor_parallel]]
        try:
            for place in plan.places:
                files = shared[place.stage]
                before = None if place.first else lines[place.rank - plan.tensor_parallel]
                after = None if place.last else lines[place.rank]
                child: Child[FromRank] = Child(
                    "weft.worker.process",
                    FromRank,
                    env=environment(plan.threads(place.rank), plan.peer_to_peer),
                    files=[*opened, *descriptors(files, before, after)],
                )
                self._children.append(child)
                child.send(Launch(plan, place.rank, self._worker, store, files, before, after))
                listener = threading.Thread(
                    target=self._listen, args=(place.rank, child), name=f"weft-rank-{place.rank}", daemon=True
                )
                self._listeners.append(listener)
                listener.start()
        finally:
            for descriptor in (*opened, *descriptors(*shared, *lines)):
                os.close(descriptor)

    def _store(self) -> tuple[str, list[int]]:
        """The path of a file through which ranks find each other, and the descriptors behind it. Where the system
        has files without a name, nothing is left of it, however this process ends."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("weft-ranks")
            return f"/proc/self/fd/{file}", [file]
        self._folder = tempfile.mkdtemp(prefix="weft-")  # readable by its owner only
        return f"{self._folder}/ranks", []

    def _tell(self, message: ToRank) -> None:
        frame = encode(message)
        for child in self._children:
            child.send_frame(frame)

    def _listen(self, rank: int, child: Child[FromRank]) -> None:
        spoken = False
        try:
            for message in child.channel:
                spoken = isinstance(message, Failed)
                self._hear(rank, message)
        except FrameError as error:
            self._fail(Cause(rank, self._phases[rank], str(error)))
        if not spoken:
            self._fail(Cause(rank, self._phases[rank], *child.obituary()))

    def _kill(self) -> None:
        for child in list(self._children):
            child.kill()

    def _end(self) -> None:
        end(self._children)
        for listener in self._listeners:
            if listener is not threading.current_thread():
                listener.join()
        for child in self._children:
            child.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def environment(threads: int, peer_to_peer: bool = True) -> dict[str, str]:
    """What a rank's libraries read when they are imported; the user's own settings stay."""
    number = str(threads)
    ours = {
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "OPENBLAS_NUM_THREADS": number,
        # All ranks are on this host; gloo would take the interface of the host's name.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        SPINS: SPIN_COUNT,
        **cuda.device_order_variables(os.environ),
    }
    if not peer_to_peer:
        ours["NCCL_P2P_DISABLE"] = "1"
    return {name: value for name, value in ours.items() if name not in os.environ}


def share(ranks: int) -> Shared | None:
    """Memory and pipes for the ranks of a stage, where the system has memory without a name."""
    if ranks == 1 or not hasattr(os, "memfd_create"):
        return None
    return Shared(os.memfd_create("weft"), tuple(os.pipe() for _ in range(ranks)))


def adjoin() -> Neighbour | None:
    """Memory and pipes between two stages, where the system has memory without a name."""
    return Neighbour(os.memfd_create("weft"), os.pipe(), os.pipe()) if hasattr(os, "memfd_create") else None


def descriptors(*several: Shared | Neighbour | None) -> list[int]:
    found = []
    for files in several:
        if files is not None:
            pipes = files.pipes if isinstance(files, Shared) else (files.full, files.free)
            found += [files.memory, *(end for pipe in pipes for end in pipe)]
    return found
