"""Compilation of kernels before the first request, several at once. Triton compiles without Python's global lock, and
kernels in its cache on disk are only loaded.

Triton compiles one variant of a kernel for each set of its constants, of the dtypes of its tensors, and of the
alignment of their addresses to 16 bytes. It also distinguishes whether an integer is 1, a multiple of 16, or neither.
Integers in `do_not_specialize` do not count: these differ from step to step, and all others are fixed by the model.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch

from weft.ranks.comm.current_device import enter_device

logger = logging.getLogger("weft")

THREADS = 8  # at most: MLIR starts one more thread per core for each kernel that is compiled

KernelLaunch = Callable[[], object]


def first_of_variants(variant: Callable[[int], Hashable], most: int) -> list[int]:
    """Numbers from 1 to `most` that are the first of their variant."""
    first: dict[Hashable, int] = {}
    for number in range(1, most + 1):
        first.setdefault(variant(number), number)
    return list(first.values())


def launch_rounds(launches: Sequence[Sequence[KernelLaunch]]) -> list[list[KernelLaunch]]:
    """Launches in three rounds, each of which may run in several threads once the round before is done.

    The very first launch creates Triton's driver, without a lock. And if two threads launch a kernel for the first time
    at once, Triton loses what one of them compiled.
    """
    firsts = [group[0] for group in launches if group]
    others = [launch for group in launches for launch in group[1:]]
    return [firsts[:1], firsts[1:], others]


def warm_kernels(launches: Sequence[Sequence[KernelLaunch]], device: torch.device) -> None:
    """Run all launches; the launches of a group use the same kernels. On a GPU they run in as many threads as the rank
    may have."""

    def run_launch(launch: KernelLaunch) -> None:
        with torch.inference_mode():
            launch()

    if not launches:
        return
    began = time.monotonic()
    rounds = launch_rounds(launches)
    # Triton's interpreter runs one launch at a time.
    most = min(THREADS, torch.get_num_threads())
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        with ThreadPoolExecutor(most, "weft-warm", enter_device, (device,)) as threads:
            for batch in rounds:
                list(threads.map(run_launch, batch))
    else:
        for launch in chain(*rounds):
            run_launch(launch)
    logger.debug("%d kinds of launches are warm after %.1f s", sum(map(len, rounds)), time.monotonic() - began)
