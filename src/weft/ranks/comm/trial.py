"""Trial of symmetric memory among the ranks of a stage, by all of them together and in bounded time.

Drivers say that GPUs can read each other's memory when they cannot (virtual machines, IOMMU), and torch's rendezvous
waits for ranks that have failed in it. So the ranks vote before each step, and a step that no rank can interrupt ends
the process if it takes too long.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.errors import Cause, EngineError
from weft.logs import event_fields
from weft.ranks.comm import symmetric
from weft.ranks.comm.base import add_up
from weft.ranks.comm.distributed import DistributedGroup
from weft.ranks.comm.symmetric import (
    MAX_RANKS,
    ONE_SHOT_BYTES,
    PUBLISHED_BYTES,
    SHOT_DTYPES,
    TWO_SHOT_BYTES,
    SymmetricGroup,
)

T = TypeVar("T")

logger = logging.getLogger("weft")

# For ranks that have all come so far and have little left to do: a second, on a busy machine. A rank that waits half as
# long in torch's rendezvous, for another that has failed there, still votes in time.
TIMEOUT = timedelta(seconds=40)
WRONG = "the GPUs do not read each other's memory as they should"
VOTES = 3  # in a trial: after as many timeouts a rank is stuck
POLL_S = 0.005
HINT = "its process is stopped, or something in it does not come back; restart, or look at what it printed"


def connect_symmetric(
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    *,
    store: Store,
    ranks: Sequence[int],
    devices: Sequence[str],
    timeout: timedelta = TIMEOUT,
) -> DistributedGroup:
    """Wrap a group with symmetric memory if all of its ranks find that this works, else with NCCL alone.

    `ranks` are the plan's rank numbers of the group, `devices` their devices; `store` is the store that the group was
    made with. To be called in a process of its own, which ends if it is stuck in the driver. Raises EngineError if
    another rank is stuck.
    """
    plain = DistributedGroup(group, device)
    votes = Votes(PrefixStore(f"symmetric/{ranks[0]}", store), ranks, ranks[plain.rank], timeout)
    usual: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    store.set_timeout(timeout / 2)  # torch's rendezvous waits through it
    try:
        with end_process_after(VOTES * timeout):
            comm, objection = try_symmetric(group, device, dtype, devices, votes)
    finally:
        store.set_timeout(usual)
    if comm is not None:
        return comm
    if plain.rank == 0:
        logger.info(
            "Sums go through NCCL alone: %s", objection, extra=event_fields("no-symmetric-memory", reason=objection)
        )
    if objection.startswith(WRONG) and plain.size == dist.get_world_size():
        # One verdict for everything that would read peers' memory. NCCL reads this at its first sum, which is still to
        # come.
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
    return plain


def try_symmetric(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, devices: Sequence[str], votes: Votes
) -> tuple[SymmetricGroup | None, str]:
    """Wrap the group with symmetric memory, or return None and the reason why not: the same on every rank."""
    memory, own = None, obstacle(device, devices)
    if not own:
        memory, own = attempt(lambda: symmetric.allocate_buffer(dtype, device))
    objection = votes.first_objection("say whether it has symmetric memory", own)
    if objection or memory is None:
        return None, objection
    buffer = memory
    comm, own = attempt(lambda: symmetric.connect_buffers(group, device, buffer))
    objection = votes.first_objection("meet them in symmetric memory", own)
    if objection or comm is None:
        return None, objection
    # A sum waits for every rank on the device, without a timeout: no rank begins one that another could not begin.
    own = "" if all_add_up(comm) else WRONG
    objection = votes.first_objection("add up in symmetric memory", own)
    return (None, objection) if objection else (comm, "")


def obstacle(device: torch.device, devices: Sequence[str]) -> str:
    """Reason why a rank cannot use symmetric memory with `devices`, or "" if it may try."""
    if device.type != "cuda":
        return f"symmetric memory is for GPUs, not for {device.type}"
    if len(devices) > MAX_RANKS:
        return f"symmetric memory is for {MAX_RANKS} ranks at most, not for {len(devices)}"
    others = [other for other in devices if torch.device(other) != device]
    unreadable = [other for other in others if not torch.cuda.can_device_access_peer(device, torch.device(other))]
    return f"{device} cannot read the memory of {', '.join(unreadable)}" if unreadable else ""


def attempt(create: Callable[[], T]) -> tuple[T | None, str]:
    """Call `create`; return its result and "", or None and the error that torch raised."""
    try:
        return create(), ""
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        return None, f"no symmetric memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def all_add_up(comm: SymmetricGroup) -> bool:
    """Return True if every kind of sum is right.

    All sums are made even if one is wrong: the other ranks wait for this one in the next.
    """

    def sum_published(x: torch.Tensor) -> torch.Tensor:
        _, places = comm.parts.publish(x)
        return add_up([place[: x.numel()] for place in places], torch.empty_like(x))

    dtype, device = comm.parts.dtype, comm.parts.device
    kinds = [(sum_published, 64), (sum_published, PUBLISHED_BYTES)]
    if dtype in SHOT_DTYPES:  # NCCL sums other dtypes
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
    """Return True if several sums of `count` elements are right.

    A part that is read or overwritten too early shows in the next sum.
    """
    right = True
    for turn in range(4):
        # Small integers: exact in every dtype.
        own = torch.arange(count, device=device).remainder(7).add(rank + turn).to(dtype)
        expected = torch.arange(count, device=device).remainder(7).add(turn) * size
        expected = (expected + size * (size - 1) // 2).to(dtype)
        right = torch.equal(add(own), expected) and right
    return right


@contextmanager
def end_process_after(limit: timedelta) -> Iterator[None]:
    """End this process, with the stacks of its threads on stderr, if the block takes longer than `limit`.

    The block may be stuck in torch or in the driver, where no other thread of Python can run; the thread that ends the
    process is not Python's.
    """
    faulthandler.dump_traceback_later(limit.total_seconds(), exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Votes:
    """Votes of one group, through its `store`.

    `ranks` are the plan's rank numbers of the group, `rank` is this rank's. `timeout` is for each vote.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self._store, self._ranks, self._rank, self._timeout = store, ranks, rank, timeout

    def first_objection(self, question: str, own: str) -> str:
        """Give this rank's `own` objection to `question`, and return the first one of any rank.

        "" means no objection. Raises EngineError, in the name of the other rank, if one does not answer in time.
        """
        self._store.set(f"{question}/{self._rank}", own)
        answers = [(rank, self._wait_for_answer(question, rank)) for rank in self._ranks]
        return next((f"{answer} (rank {rank})" for rank, answer in answers if answer), "")

    def _wait_for_answer(self, question: str, rank: int) -> str:
        key, timeout_s = f"{question}/{rank}", self._timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        # Not the store's own wait: a store in a file polls once a second.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                cause = f"the others have waited {timeout_s:g} s for it to {question}"
                raise EngineError(Cause(rank=rank, phase="start", code="rank-not-answering", cause=cause, hint=HINT))
            time.sleep(POLL_S)
        return self._store.get(key).decode()
