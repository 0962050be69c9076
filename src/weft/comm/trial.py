"""Trial: whether symmetric memory works among the ranks of a stage, found out together, in bounded time.

Drivers say that GPUs can read each other where they cannot (virtual machines, IOMMU), and torch's rendezvous waits for
ranks that have failed in it. So each step is asked about first, and what no rank can interrupt ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.comm import symmetric
from weft.comm.base import add_up
from weft.comm.distributed import DistributedComm
from weft.comm.symmetric import MOST_RANKS, ONE_SHOT_BYTES, PUBLISHED_BYTES, SHOT_DTYPES, TWO_SHOT_BYTES, SymmetricComm
from weft.comm.votes import Votes

T = TypeVar("T")

logger = logging.getLogger("weft")

# For ranks that have all come so far and have little to do: a second, where the machine is busy. One that waits half as
# long in torch's rendezvous, for another that has failed there, still votes in time.
PATIENCE = timedelta(seconds=40)
WRONG = "the GPUs do not read each other's memory as they should"
WAITS = 3  # as long as that, and a rank is stuck: there are three votes


def connect_symmetric(
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    *,
    store: Store,
    ranks: Sequence[int],
    devices: Sequence[str],
    patience: timedelta = PATIENCE,
) -> DistributedComm:
    """The group with symmetric memory where all of its ranks find that this works, else with NCCL alone. `ranks` are
    the plan's numbers of the group's, `devices` theirs; `store` is the one that the group was made with. To be called
    in a process of its own: one that is stuck in the driver ends. Raises EngineError where another rank is stuck."""
    plain = DistributedComm(group, device)
    votes = Votes(PrefixStore(f"symmetric/{ranks[0]}", store), ranks, ranks[plain.rank], patience)
    usual: timedelta = store.timeout  # type: ignore[attr-defined]  # lacks in its types
    store.set_timeout(patience / 2)  # torch's rendezvous waits through it
    try:
        with end_after(WAITS * patience):
            made, objection = try_symmetric(group, device, dtype, devices, votes)
    finally:
        store.set_timeout(usual)
    if made is not None:
        return made
    if plain.rank == 0:
        logger.info("Sums go through NCCL alone: %s", objection)
    if objection.startswith(WRONG) and plain.size == dist.get_world_size():
        # One verdict for all who would read peers' memory. NCCL reads this at its first sum, which is still to come.
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
    return plain


def try_symmetric(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, devices: Sequence[str], votes: Votes
) -> tuple[SymmetricComm | None, str]:
    """The group with symmetric memory, or None and why not: the same on every rank."""
    memory, mine = None, obstacle(device, devices)
    if not mine:
        memory, mine = attempt(lambda: symmetric.allocate_buffer(dtype, device))
    if (said := votes.objection("say whether it has symmetric memory", mine)) or memory is None:
        return None, said
    room = memory
    made, mine = attempt(lambda: symmetric.connect_buffers(group, device, room))
    if (said := votes.objection("meet them in symmetric memory", mine)) or made is None:
        return None, said
    # Sums wait for every rank on the device, without an end: none began where another could not.
    mine = "" if all_add_up(made) else WRONG
    said = votes.objection("add up in symmetric memory", mine)
    return (None, said) if said else (made, "")


def obstacle(device: torch.device, devices: Sequence[str]) -> str:
    """Why a rank cannot begin, "" where it can."""
    if device.type != "cuda":
        return f"symmetric memory is for GPUs, not for {device.type}"
    if len(devices) > MOST_RANKS:
        return f"{len(devices)} ranks read too much of each other, {MOST_RANKS} at most do"
    others = [other for other in devices if torch.device(other) != device]
    deaf = [other for other in others if not torch.cuda.can_device_access_peer(device, torch.device(other))]
    return f"{device} cannot read the memory of {', '.join(deaf)}" if deaf else ""


def attempt(make: Callable[[], T]) -> tuple[T | None, str]:
    """What was made, or None and why not."""
    try:
        return make(), ""
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        return None, f"no symmetric memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def all_add_up(comm: SymmetricComm) -> bool:
    """Whether its sums are right, of every kind. Wrong ones end nothing: the other ranks wait for this one in the
    next."""

    def laid(x: torch.Tensor) -> torch.Tensor:
        _, places = comm.parts.publish(x)
        return add_up([place[: x.numel()] for place in places], torch.empty_like(x))

    dtype, device = comm.parts.dtype, comm.parts.device
    kinds = [(laid, 64), (laid, PUBLISHED_BYTES)]
    if dtype in SHOT_DTYPES:  # others are NCCL's
        kinds += [(comm.sum, 64), (comm.sum, ONE_SHOT_BYTES), (comm.sum, TWO_SHOT_BYTES)]
    right = [adds_up(add, comm.rank, comm.size, size // dtype.itemsize, dtype, device) for add, size in kinds]
    comm.parts.begin()
    return all(right)


def adds_up(
    add: Callable[[torch.Tensor], torch.Tensor],
    rank: int,
    size: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether sums of `count` elements are right, again and again: a part that is read too early, or overwritten too
    early, shows in the next."""
    right = True
    for turn in range(4):
        # Small whole numbers: exact in every dtype.
        mine = torch.arange(count, device=device).remainder(7).add(rank + turn).to(dtype)
        want = torch.arange(count, device=device).remainder(7).add(turn) * size
        want = (want + size * (size - 1) // 2).to(dtype)
        right = torch.equal(add(mine), want) and right
    return right


@contextmanager
def end_after(limit: timedelta) -> Iterator[None]:
    """End this process, with the stacks of its threads on stderr, where what is done here does not come back. It may be
    in torch or in the driver, where no other thread of Python can run; this one is not Python's."""
    faulthandler.dump_traceback_later(limit.total_seconds(), exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
