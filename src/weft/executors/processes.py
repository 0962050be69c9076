"""ProcessExecutor: one process per rank, with a socket to each."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading

from weft.executors.causes import cause_of
from weft.executors.framing import FrameError, encode_frame
from weft.executors.launch import Child, end_children
from weft.executors.messages import Failed, FromRank, Launch, LinkFiles, StageFiles, ToRank
from weft.executors.rank import SPIN_COUNT, SPIN_VARIABLE, WORKER
from weft.executors.ranks import RankExecutor
from weft.hardware import cuda
from weft.plan.plan import Plan

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ProcessExecutor(RankExecutor):
    """Runs each rank as a child process. `worker` is the class that each rank runs, as "module:Class"."""

    def __init__(self, worker: str = WORKER) -> None:
        super().__init__(worker)
        self._children: list[Child[FromRank]] = []
        self._listeners: list[threading.Thread] = []
        self._folder: str | None = None

    def _launch(self, plan: Plan) -> None:
        store, store_files = self._open_store()
        shared = [create_stage_files(plan.tensor_parallel) for _ in range(plan.stages)]
        # links[rank]: from that rank to the same tensor-parallel rank of the next stage.
        links = [create_link_files() for _ in plan.places[: -plan.tensor_parallel]]
        try:
            for place in plan.places:
                files = shared[place.stage]
                before = None if place.first else links[place.rank - plan.tensor_parallel]
                after = None if place.last else links[place.rank]
                child: Child[FromRank] = Child(
                    "weft.worker.process",
                    FromRank,
                    env=rank_environment(plan.threads(place.rank), plan.peer_to_peer),
                    files=[*store_files, *file_descriptors(files, before, after)],
                )
                self._children.append(child)
                child.send(Launch(plan, place.rank, self._worker, store, files, before, after))
                listener = threading.Thread(
                    target=self._listen, args=(place.rank, child), name=f"weft-rank-{place.rank}", daemon=True
                )
                self._listeners.append(listener)
                listener.start()
        finally:
            for descriptor in (*store_files, *file_descriptors(*shared, *links)):
                os.close(descriptor)

    def _open_store(self) -> tuple[str, list[int]]:
        """Return the path of torch's rendezvous file, and the descriptors behind it.

        If the system has anonymous files, no trace of the file is left, however this process ends.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("weft-ranks")
            return f"/proc/self/fd/{file}", [file]
        self._folder = tempfile.mkdtemp(prefix="weft-")  # readable by its owner only
        return f"{self._folder}/ranks", []

    def _send_all(self, message: ToRank) -> None:
        frame = encode_frame(message)
        for child in self._children:
            child.send_frame(frame)

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


def create_stage_files(ranks: int) -> StageFiles | None:
    """Open memory and pipes for the ranks of a stage; None for one rank, or if the system lacks anonymous files."""
    if ranks == 1 or not hasattr(os, "memfd_create"):
        return None
    return StageFiles(os.memfd_create("weft"), tuple(os.pipe() for _ in range(ranks)))


def create_link_files() -> LinkFiles | None:
    """Open memory and pipes between two stages; None if the system lacks anonymous files."""
    return LinkFiles(os.memfd_create("weft"), os.pipe(), os.pipe()) if hasattr(os, "memfd_create") else None


def file_descriptors(*several: StageFiles | LinkFiles | None) -> list[int]:
    """Return all descriptors in these files."""
    descriptors = []
    for files in several:
        if files is not None:
            pipes = files.pipes if isinstance(files, StageFiles) else (files.full, files.free)
            descriptors += [files.memory, *(end for pipe in pipes for end in pipe)]
    return descriptors
