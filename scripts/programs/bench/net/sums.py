"""Sums of vectors over a slow link: gloo's all-reduce beside Weft's.

As a program, `sums.py RANK RANKS PORT`, it is one of the ranks; rank 0 prints the figures as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scripts.programs.bench.net.links import ADDRESSES, DEVICE, SlowLink
from weft.ranks.comm.gloo import GlooGroup

SIZES = tuple(1 << exponent for exponent in range(10, 21, 2))  # bytes
ROUNDS = 7  # in which the two take turns; the best counts
ROUND_BYTES, MAX_CALLS = 4 << 20, 20  # bytes and calls of one size in each round
PINGS = 50
LIMIT_S = 150


def measure_sums(link: SlowLink, ranks: int, port: int) -> dict[str, Any]:
    """Run `ranks` ranks, half of them on each side of the link; return what rank 0 has measured."""
    processes = []
    for rank in range(ranks):
        inside = [*link.inside(rank * 2 // ranks), "env", f"GLOO_SOCKET_IFNAME={DEVICE}", "OMP_NUM_THREADS=1"]
        command = [*inside, sys.executable, "-m", "scripts.programs.bench.net.sums", str(rank), str(ranks), str(port)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        printed = processes[0].communicate(timeout=LIMIT_S)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return figures


def sums_table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = [
        f"a small message there and back: {figures['round_trip_us']:,.0f} us",
        "",
        "| bytes | gloo's all-reduce, us | Weft's sum, us |",
        "|---:|---:|---:|",
    ]
    lines += [f"| {size:,} | {gloo:,.0f} | {ours:,.0f} |" for size, gloo, ours in figures["sums"]]
    return "\n".join(lines)


def best_times(size: int, ways: list[Callable[[torch.Tensor], object]]) -> list[float]:
    """Least mean microseconds of each way to sum vectors of `size` bytes; the ways take turns."""
    x = torch.ones(size // 4)
    calls, best = min(MAX_CALLS, max(4, ROUND_BYTES // size)), [float("inf")] * len(ways)
    for _ in range(ROUNDS):
        for number, way in enumerate(ways):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                way(x)
            best[number] = min(best[number], (time.perf_counter() - began) / calls * 1e6)
    return best


def round_trip(rank: int) -> float:
    """Least microseconds of a message to the last rank and back, without gloo's wait for a receive."""
    last, shortest = dist.get_world_size() - 1, float("inf")
    x = torch.zeros(1)
    if rank not in (0, last):
        return shortest
    other = last - rank
    for _ in range(PINGS):
        arriving = dist.irecv(x, other)
        began = time.perf_counter()
        if rank == 0:
            time.sleep(0.005)  # until both have posted
            began = time.perf_counter()
            dist.send(torch.zeros(1), other)
        assert arriving is not None
        arriving.wait()
        if rank == last:
            dist.send(torch.zeros(1), other)
        shortest = min(shortest, (time.perf_counter() - began) * 1e6)
    return shortest


def main(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank * 2 // ranks})
    store = dist.TCPStore(ADDRESSES[0], port, ranks, is_master=rank == 0)  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world is not None
    group = GlooGroup(world, torch.device("cpu"))
    ways: list[Callable[[torch.Tensor], object]] = [dist.all_reduce, group.sum]
    figures = {"round_trip_us": round_trip(rank), "sums": [[size, *best_times(size, ways)] for size in SIZES]}
    if rank == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
