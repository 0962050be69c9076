"""RankProcesses: the processes of a node's ranks, with a thread that listens to each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from weft.cache import cache_path, make_private
from weft.engine.executors.messages import FromRank, PhaseEntered, RankFailed, ToRank
from weft.engine.executors.rank import SPIN_COUNT, SPIN_VARIABLE
from weft.engine.processes.causes import cause_of
from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.forks import pool
from weft.engine.processes.framing import FrameError, encode_frame
from weft.engine.processes.launch import Child, child_environment, end_children
from weft.engine.processes.liveness import Alive, Heartbeat, Silence
from weft.errors import Cause
from weft.machine.hardware import cuda
from weft.plan.plan import Plan
from weft.plan.wiring import EdgeFiles, GroupFiles, Network, SharedMemory, Wiring


class RankProcesses:
    """The processes of one node's ranks.

    `take` gets every message of a rank, `lost` the cause of the end of a process that sent no last message. Both are
    called from the thread that listens to the rank.
    """

    def __init__(self, take: Callable[[int, FromRank], None], lost: Callable[[Cause], None]) -> None:
        self.phases: dict[int, str] = {}  # by rank, as are the next
        self.steps: dict[int, int] = {}  # that each has finished, as of its last heartbeat
        self.silences: dict[int, Silence] = {}
        self._take, self._lost = take, lost
        self._children: dict[int, Child[FromRank]] = {}
        self._listeners: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards the next
        self._server: ForkClient | None = None

    def prepare_forks(self, environment: dict[str, str], count: int) -> None:
        """Have the processes forked, if that is possible and pays."""
        self._server = pool.acquire(child_environment(environment), count)

    def start(self, rank: int, environment: dict[str, str], files: Sequence[int] = ()) -> None:
        """Start the process of a rank, which inherits `files`, and listen to it."""
        child: Child[FromRank] = Child(
            "weft.worker.process", FromRank, env=environment, files=files, server=self._server
        )
        self._children[rank], self.phases[rank], self.steps[rank] = child, "start", 0
        self.silences[rank] = Silence(child.process.pid)
        listener = threading.Thread(target=self._listen, args=(rank, child), name=f"weft-rank-{rank}", daemon=True)
        self._listeners.append(listener)
        listener.start()

    def send(self, message: ToRank, ranks: Iterable[int]) -> None:
        """Send a message to these ranks, as far as they are on this node."""
        frame = encode_frame(message)
        for rank in ranks:
            if child := self._children.get(rank):
                child.send_frame(frame)

    def offer(self, message: Heartbeat) -> None:
        """Send every rank a heartbeat, without waiting for a rank that reads nothing."""
        for child in list(self._children.values()):
            child.offer(message)

    def print_stacks(self) -> None:
        """Have every rank print its stacks."""
        for child in list(self._children.values()):
            child.print_stacks()

    def kill(self) -> None:
        """Kill all ranks, without waiting."""
        for child in list(self._children.values()):
            child.kill()

    def end(self) -> None:
        """End all ranks, and wait until they are gone. May be called twice."""
        children = list(self._children.values())
        end_children(children)
        for listener in self._listeners:
            if listener is not threading.current_thread():
                listener.join()
        for child in children:
            child.close()
        with self._lock:
            server, self._server = self._server, None
        if server:
            pool.release(server)

    def _listen(self, rank: int, child: Child[FromRank]) -> None:
        failed = False
        try:
            for message in child.channel:
                if isinstance(message, Alive):
                    self.steps[rank] = message.steps
                    self.silences[rank].hear(busy=message.computes)
                    continue
                failed = isinstance(message, RankFailed)
                if isinstance(message, PhaseEntered):
                    self.phases[rank] = message.phase
                self._take(rank, message)
        except FrameError as error:
            self._lost(cause_of(error, rank, self.phases[rank]))
        if not failed:
            self._lost(child.describe_exit().of(rank, self.phases[rank]))


class NodeWirings:
    """The ways in which one node's ranks exchange tensors: `wirings`, and the open `files` of each, by rank.

    A context manager: on leaving, the files are closed here, and stay open in the processes that have inherited them.
    """

    def __init__(self, plan: Plan, node: int = 0) -> None:
        self.wirings: dict[int, Wiring] = dict.fromkeys(plan.ranks_of(node), Network())
        self.files: dict[int, list[int]] = {rank: [] for rank in self.wirings}
        if plan.exclusive_gpus or not hasattr(os, "memfd_create"):
            return
        shared: dict[int, SharedMemory] = open_shared_memory(plan, node)
        self.wirings.update(shared)
        self.files = {rank: shared_descriptors(memory) for rank, memory in shared.items()}

    def __enter__(self) -> NodeWirings:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in set(chain.from_iterable(self.files.values())):
            os.close(descriptor)


def rank_environment(threads: int, peer_to_peer: bool = True, *, interface: str) -> dict[str, str]:
    """Environment variables that a rank's libraries read when they are imported. The user's own settings stay.

    `interface` is the network interface that routes to the other ranks.
    """
    number = str(threads)
    ours = {
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "OPENBLAS_NUM_THREADS": number,
        # Gloo would take the interface of the host's name.
        "GLOO_SOCKET_IFNAME": interface,
        SPIN_VARIABLE: SPIN_COUNT,
        **cuda.device_order_variables(os.environ),
    }
    if not peer_to_peer:
        ours["NCCL_P2P_DISABLE"] = "1"
    return {name: value for name, value in ours.items() if name not in os.environ}


def network_environment(plan: Plan, rank: int, interface: str) -> dict[str, str]:
    """The `rank_environment` of a rank whose peers are on other nodes."""
    environment = rank_environment(plan.threads(rank), plan.peer_to_peer, interface=interface)
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"  # NCCL takes a bare name as the beginning of names
    return environment if plan.on_cpu else environment | nccl_log_variables(os.environ)


def nccl_log_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which NCCL writes down its choices for the rank (`ranks/comm/nccl_log.py`), unless the user has
    others.

    The file is in a folder of this user alone: NCCL would follow a link that others have put in its place.
    """
    if any(name in environment for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE")):
        return {}
    folder = cache_path() / "nccl"
    try:
        make_private(folder)
    except (OSError, RuntimeError):
        return {}
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_DEBUG_FILE": str(folder / "weft-nccl-%p.log"),
    }


def open_shared_memory(plan: Plan, node: int = 0) -> dict[int, SharedMemory]:
    """Open the memory and the pipes of every rank of a node, by rank.

    Groups and pairs of stages that span nodes have none.
    """
    size, own = plan.tensor_parallel, plan.ranks_of(node)
    partitions = [*plan.tensor_groups, *plan.exchange_groups]
    groups = [open_group_files(ranks) for ranks in partitions if len(ranks) > 1 and set(ranks) <= set(own)]
    # edges[rank]: from that rank to the same tensor-parallel rank of the next stage.
    edges = {rank: open_edge_files() for rank in own if not plan.places[rank].last and rank + size in own}
    return {
        rank: SharedMemory(
            groups=tuple(files for files in groups if rank in files.ranks),
            before=None if plan.places[rank].first else edges.get(rank - size),
            after=edges.get(rank),
        )
        for rank in own
    }


def open_group_files(ranks: Sequence[int]) -> GroupFiles:
    """Open memory and pipes for the ranks of a group."""
    return GroupFiles(tuple(ranks), os.memfd_create("weft"), tuple(os.pipe() for _ in ranks))


def open_edge_files() -> EdgeFiles:
    """Open memory and pipes between two stages."""
    return EdgeFiles(os.memfd_create("weft"), os.pipe(), os.pipe())


def shared_descriptors(memory: SharedMemory) -> list[int]:
    """Return all descriptors of a rank's memory and pipes."""
    pipes = [pipe for edge in (memory.before, memory.after) if edge for pipe in (edge.full, edge.free)]
    for group in memory.groups:
        pipes += group.pipes
    files = [files.memory for files in (*memory.groups, memory.before, memory.after) if files]
    return [*files, *(end for pipe in pipes for end in pipe)]
