"""The files of sharded state, written by threads that hold the ranks' shares for a moment each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import msgspec
import torch

from weft.checkpoint.files.sharded import ShardedState
from weft.plan.plan import Plan
from weft.ranks.comm.connect import Site, connect_rank
from weft.ranks.comm.threads import Threads
from weft.ranks.kernels import create_rounding
from weft.ranks.kernels.attention import AttentionShape
from weft.ranks.weights.load import allocate_parameters, load_weights, open_source, parameter_groups
from weft.ranks.weights.sharded import Targets, create_shard, write_groups
from weft.ranks.worker.importance import measure_importance

CPU = torch.device("cpu")


def write_shards(plan: Plan, state: ShardedState, folder: Path, report: Callable[[int, int, int], None]) -> None:
    """Write the file of each rank of a plan for CPUs into a directory. One layer of each rank is in memory at a time.

    `report` gets a rank, the bytes that it has read and all that it reads. After Ctrl-C, and if a rank fails, all ranks
    end before their next layer. Raises ModelError and OSError.
    """
    wiring, stopped = Threads(plan), Event()

    def stop() -> None:
        stopped.set()
        wiring.abort()  # ranks that wait for others end, too

    def write_rank(rank: int) -> None:
        try:
            _write_rank(plan, state, folder, rank, wiring, report, stopped)
        except BaseException:
            stop()
            raise

    with ThreadPoolExecutor(len(plan.places), "weft-shard") as pool:
        jobs = [pool.submit(write_rank, place.rank) for place in plan.places]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop()
            raise
    errors = [error for job in jobs if (error := job.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, ConnectionError)):
        raise error


@torch.inference_mode()
def _write_rank(
    plan: Plan,
    state: ShardedState,
    folder: Path,
    rank: int,
    wiring: Threads,
    report: Callable[[int, int, int], None],
    stopped: Event,
) -> None:
    place, done = plan.places[rank], 0
    outline = allocate_parameters(plan, place, CPU, matrices=torch.device("meta"))
    links = connect_rank(Site(plan, rank, wiring))
    importance = measure_importance(plan, rank, links, outline, CPU)
    rounding = create_rounding(plan.attention_backend, CPU, AttentionShape.from_plan(plan, rank))
    source, total = open_source(plan), sum(target.nbytes for target in outline.values())

    def groups() -> Iterator[Targets]:
        nonlocal done
        for names in parameter_groups(plan, place):
            if stopped.is_set():
                raise ConnectionAbortedError("another rank has ended")
            targets = allocate_parameters(plan, place, CPU, names=names)
            load_weights(plan, place, targets, rounding, importance, source=source)
            yield targets
            done += sum(target.nbytes for target in targets.values())
            report(rank, done, total)

    text = msgspec.json.encode(msgspec.structs.replace(state, rank=rank)).decode()
    with create_shard(folder, rank, outline, text) as shard:
        write_groups(shard, groups())
