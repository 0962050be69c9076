"""A rank of two over gloo: it joins, sums and makes a group more for each line that comes, and ends in order."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.ranks.comm.connect import closing_gloo
from weft.ranks.comm.listeners import listening_sockets

WAIT = timedelta(seconds=60)


def main(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with closing_gloo("gloo"):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=WAIT)
    groups: list[dist.ProcessGroup | None] = [None]
    while True:
        for group in groups:
            x = torch.full((1000,), rank + 1.0)
            dist.all_reduce(x, group=group)
            assert bool((x == 3).all())
        print(len(listening_sockets()), flush=True)
        if not sys.stdin.readline():
            break
        with closing_gloo("gloo"):
            groups.append(dist.new_group([0, 1], backend="gloo", timeout=WAIT))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
