"""Connecting a rank to the others: one table of transports for groups and one for links between stages."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.plan.plan import Plan
from weft.plan.wiring import EdgeFiles, File, Rendezvous, SharedMemory, Tcp, Wiring
from weft.ranks.comm.base import Group, Links, Solo, StageLink
from weft.ranks.comm.distributed import DistributedGroup, DistributedLink, peers_may_vanish
from weft.ranks.comm.gloo import GlooGroup, GlooLink
from weft.ranks.comm.line import Edge, JoinedLink, SharedMemoryLink
from weft.ranks.comm.listeners import closing_listeners
from weft.ranks.comm.shared import SharedMemoryGroup
from weft.ranks.comm.threads import Threads
from weft.ranks.comm.trial import connect_symmetric

# Collectives do not time out: the executor notices at once if a rank dies, and a rank that loads for long is not dead.
NEVER = timedelta(days=365)
CONNECT = timedelta(seconds=30)  # to rank 0, which has been reached once

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"  # with it, gloo connects two ranks in their first operation

Ranks = Sequence[int]
Link = TypeVar("Link", Group, StageLink)


class Site:
    """A rank that is to be connected, with the way in which the executor wired it to the others.

    `listener` is rank 0's socket of a rendezvous over TCP.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        wiring: Wiring | Threads,
        rendezvous: Rendezvous | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.plan, self.rank, self.wiring = plan, rank, wiring
        self.device = torch.device(plan.devices[rank].name)
        self._rendezvous, self._listener = rendezvous, listener
        self._listening: int | None = None  # descriptor of rank 0's store
        self._store: Store | None = None

    def join_world(self) -> Store:
        """Join the world of torch.distributed, which has all ranks of the plan; return its store."""
        if self._store is None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            size = len(self.plan.places)
            with peers_may_vanish():
                self._listening = self._listener.fileno() if self._listener else None
                self._store = open_store(self._rendezvous, self._listener, size)
                with closing_gloo("gloo"):
                    dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=size, timeout=NEVER)
        return self._store

    def process_group(self, backend: str, partition: Sequence[Ranks]) -> dist.ProcessGroup:
        """This rank's process group of a partition of all ranks. Every rank calls this for the same ones in order."""
        self.join_world()
        if isinstance(self.wiring, SharedMemory):
            # The other groups may need none.
            with peers_may_vanish(), closing_gloo(backend):
                own = list(self.own(partition))
                group: dist.ProcessGroup = dist.new_group(
                    own, backend=backend, timeout=NEVER, use_local_synchronization=True
                )
                return group
        with peers_may_vanish(), closing_gloo(backend):
            groups = [dist.new_group(list(ranks), backend=backend, timeout=NEVER) for ranks in partition]
        return next(group for group, ranks in zip(groups, partition, strict=True) if self.rank in ranks)

    def end_rendezvous(self) -> None:
        """Have rank 0's store listen no longer, once all CPU ranks are connected.

        It can check no peer's key. Its connections stay. NCCL meets through it later, in its first operations.
        """
        if self._store is None or not isinstance(self._rendezvous, Tcp) or not self.plan.on_cpu:
            return
        with peers_may_vanish():
            dist.barrier()
        if self._listening is not None:
            # The store owns the descriptor and cannot be asked to close it.
            with socket.socket() as unbound:
                os.dup2(unbound.fileno(), self._listening, inheritable=False)

    def own(self, partition: Sequence[Ranks]) -> Ranks:
        """The part of a partition that this rank is in."""
        return next(ranks for ranks in partition if self.rank in ranks)


def closing_gloo(backend: str) -> AbstractContextManager[None]:
    """A context in which process groups are created: at its end, gloo listens no longer.

    Each rank of a group is connected to every other one then, unless the user has told torch to connect later. Gloo can
    check no peer's key, and keeps what any process connects to it; without descriptors it ends the process.
    """
    connects_later = os.environ.get(LAZY_VARIABLE, "0").lower() not in ("", "0", "false", "n", "no")
    return nullcontext() if backend != "gloo" or connects_later else closing_listeners()


def open_store(rendezvous: Rendezvous | None, listener: socket.socket | None, size: int) -> Store:
    """Open the store through which `size` ranks find each other. Raises RuntimeError if rank 0 is not reached."""
    if isinstance(rendezvous, File):
        return dist.FileStore(rendezvous.path, size)  # type: ignore[attr-defined]  # missing in torch's stubs
    assert rendezvous, "threads have no process groups"
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in torch's stubs
        rendezvous.host,
        rendezvous.port,
        size,
        is_master=listener is not None,
        timeout=CONNECT,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,  # the store closes it
    )
    store.set_timeout(NEVER)
    return store


# --- transports of groups ---


def create_alone(site: Site, partition: Sequence[Ranks]) -> Solo:
    return Solo()


def create_thread_group(site: Site, partition: Sequence[Ranks]) -> Group:
    assert isinstance(site.wiring, Threads)
    return site.wiring.group(site.own(partition), site.rank, site.device)


def create_symmetric_group(site: Site, partition: Sequence[Ranks]) -> Group:
    group, ranks, plan = site.process_group("nccl", partition), site.own(partition), site.plan
    devices = [plan.devices[peer].name for peer in ranks]
    dtype = getattr(torch, plan.dtype)
    return connect_symmetric(group, site.device, dtype, store=site.join_world(), ranks=ranks, devices=devices)


def create_nccl_group(site: Site, partition: Sequence[Ranks]) -> Group:
    return DistributedGroup(site.process_group("nccl", partition), site.device)


def create_shared_memory_group(site: Site, partition: Sequence[Ranks]) -> Group:
    assert isinstance(site.wiring, SharedMemory)
    ranks = tuple(site.own(partition))
    files = next(files for files in site.wiring.groups if files.ranks == ranks)
    return SharedMemoryGroup(ranks.index(site.rank), files.memory, files.pipes)


def create_gloo_group(site: Site, partition: Sequence[Ranks]) -> Group:
    return GlooGroup(site.process_group("gloo", partition), site.device)


# --- transports of links between stages ---


def create_thread_link(site: Site, partition: Sequence[Ranks]) -> StageLink:
    assert isinstance(site.wiring, Threads)
    return site.wiring.link(site.own(partition), site.rank, site.device)


def create_nccl_link(site: Site, partition: Sequence[Ranks]) -> StageLink:
    return DistributedLink(site.process_group("nccl", partition), site.device)


def create_shared_memory_link(site: Site, partition: Sequence[Ranks]) -> StageLink:
    assert isinstance(site.wiring, SharedMemory)

    def edge(files: EdgeFiles | None) -> Edge | None:
        return Edge(files.memory, files.full, files.free) if files else None

    return SharedMemoryLink(edge(site.wiring.before), edge(site.wiring.after), site.device)


def create_mixed_link(site: Site, partition: Sequence[Ranks]) -> StageLink:
    """A link of which only some pairs of neighbouring stages share memory."""
    assert isinstance(site.wiring, SharedMemory)
    between_nodes = GlooLink(site.process_group("gloo", partition), site.device)
    within_node = create_shared_memory_link(site, partition)
    return JoinedLink(
        before=within_node if site.wiring.before else between_nodes,
        after=within_node if site.wiring.after else between_nodes,
    )


def create_gloo_link(site: Site, partition: Sequence[Ranks]) -> StageLink:
    return GlooLink(site.process_group("gloo", partition), site.device)


# --- when they apply ---


def is_alone(site: Site, ranks: Ranks) -> bool:
    return len(ranks) == 1


def are_threads(site: Site, ranks: Ranks) -> bool:
    return isinstance(site.wiring, Threads)


def share_memory(site: Site, ranks: Ranks) -> bool:
    return isinstance(site.wiring, SharedMemory) and site.plan.on_one_node(ranks)


def share_some_memory(site: Site, ranks: Ranks) -> bool:
    return isinstance(site.wiring, SharedMemory)


def own_gpus(site: Site, ranks: Ranks) -> bool:
    return site.plan.exclusive_gpus


def may_read_each_other(site: Site, ranks: Ranks) -> bool:
    return site.plan.exclusive_gpus and site.plan.peer_to_peer and site.plan.on_one_node(ranks)


def always(site: Site, ranks: Ranks) -> bool:
    return True


# --- the tables ---

# The first transport that applies to a rank's group is used. Its second function gets the whole partition, since every
# rank has to create every process group.
Applies = Callable[[Site, Ranks], bool]
Transports = Sequence[tuple[Applies, Callable[[Site, Sequence[Ranks]], Link]]]

GROUP_TRANSPORTS: Transports[Group] = (
    (is_alone, create_alone),
    (are_threads, create_thread_group),
    (may_read_each_other, create_symmetric_group),
    (own_gpus, create_nccl_group),
    (share_memory, create_shared_memory_group),
    (always, create_gloo_group),
)

# Symmetric memory is for small sums.
EXCHANGE_TRANSPORTS: Transports[Group] = tuple(row for row in GROUP_TRANSPORTS if row[1] is not create_symmetric_group)

LINK_TRANSPORTS: Transports[StageLink] = (
    (is_alone, create_alone),
    (are_threads, create_thread_link),
    (own_gpus, create_nccl_link),
    (share_memory, create_shared_memory_link),
    (share_some_memory, create_mixed_link),
    (always, create_gloo_link),
)


def connect_rank(site: Site) -> Links:
    """Connect a rank to the others. Every rank of the plan calls this, and it returns when all have."""
    plan = site.plan
    if plan.nodes > 1:
        site.join_world()  # all ranks take part in it, even ranks that need no process group
    links = connect_links(site)
    site.end_rendezvous()
    return links


def connect_links(site: Site) -> Links:
    """Connect a rank to its groups and to the neighbouring stages."""
    plan = site.plan
    tensor = connect(GROUP_TRANSPORTS, site, plan.tensor_groups)
    stage = connect(LINK_TRANSPORTS, site, plan.pipelines)
    if plan.exchange is None:
        return Links(tensor=tensor, stage=stage)
    exchange = connect(EXCHANGE_TRANSPORTS, site, plan.exchange_groups)
    if plan.exchange == "gather":
        return Links(tensor=tensor, stage=stage, data=exchange)
    return Links(tensor=tensor, stage=stage, expert=exchange)


def connect(transports: Transports[Link], site: Site, partition: Sequence[Ranks]) -> Link:
    """Connect this rank to its group of a partition of all ranks, by the first transport that applies."""
    ranks = site.own(partition)
    return next(create for applies, create in transports if applies(site, ranks))(site, partition)
