"""Symmetric memory between several ranks on one card: the scenarios of tests/gpu/sums_worker.py. Right, not fast: ranks
that wait for each other take turns on the card."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.ranks import RankError, module_command, run_ranks

SCENARIOS = {"bits": 0, "graphs": 1}
LIMIT_S = 80
# torch refuses two ranks of a rendezvous on one device without it.
ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
STAND_IN = "import os; assert os.environ['TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES'] == '1'"


def symmetric(options: Options) -> Iterator[Figure]:
    """A figure per scenario and number of ranks: seconds, or what failed."""
    for size in (2, 4):
        for scenario, number in SCENARIOS.items():
            name = f"symmetric memory, {size} ranks on one card: {scenario}"
            with TemporaryDirectory() as folder:
                commands = [
                    [sys.executable, "-S", "-c", STAND_IN]
                    if options["rehearse"]
                    else module_command(
                        "scripts.programs.gpu_check.work.symmetric", rank, size, number, f"{folder}/store"
                    )
                    for rank in range(size)
                ]
                began = time.monotonic()
                try:
                    run_ranks(commands, ENVIRONMENT, LIMIT_S)
                except RankError as error:
                    yield Figure(name, None, "s", ok=False, note=str(error))
                else:
                    yield Figure(name, round(time.monotonic() - began, 1), "s", ok=True)


def be_rank(rank: int, size: int, scenario: int, store: str) -> None:
    """One rank of a scenario, on cuda:0."""
    import msgspec
    import torch
    import torch.distributed as dist

    tests = Path(__file__).parents[4] / "tests"
    sys.path[:0] = [str(tests / "cpu"), str(tests / "gpu")]
    from fake_worker import make_plan, make_step
    from sums_worker import SumsWorker

    from weft.plan.plan import named_devices
    from weft.ranks.comm import Links
    from weft.ranks.comm import symmetric as symmetric_memory

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    kept = dist.FileStore(store, size)  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    comm = symmetric_memory.connect_buffers(group, device, symmetric_memory.allocate_buffer(torch.bfloat16, device))
    plan = msgspec.structs.replace(make_plan(tensor=size), dtype="bfloat16", devices=named_devices(*("cuda:0",) * size))
    SumsWorker(plan, rank, Links(tensor=comm)).execute(make_step(0, [scenario]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, size, scenario = map(int, sys.argv[1:4])
    be_rank(rank, size, scenario, sys.argv[4])
