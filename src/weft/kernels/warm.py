"""Warm: kernels compiled before requests meet them, several at once. Triton compiles outside of Python's lock, and
what its cache on disk has is only loaded.

A variant is what Triton compiles by itself: a kernel's constants, the dtypes of its tensors and whether they begin at a
multiple of 16 bytes, and of each integer whether it is 1 or a multiple of 16. Not of those in `do_not_specialize`: what
differs from step to step is there, and the others are a model's own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch

logger = logging.getLogger("weft")

THREADS = 8  # at most: MLIR begins as many more as there are cores for each kernel that is compiled

KernelLaunch = Callable[[], object]


def turns(variant: Callable[[int], Hashable], most: int) -> list[int]:
    """Of 1 to `most` the numbers that are the first of their variant."""
    first: dict[Hashable, int] = {}
    for number in range(1, most + 1):
        first.setdefault(variant(number), number)
    return list(first.values())


def warm_kernels(launches: Sequence[Sequence[KernelLaunch]], device: torch.device) -> None:
    """Run them all, those of a group launching the same kernels; on a GPU in threads, as many as the rank may have."""

    def begin() -> None:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # by CUDA's runtime, which gives the thread the device's context

    def run(launch: KernelLaunch) -> None:
        with torch.inference_mode():
            launch()

    if not launches:
        return
    began = time.monotonic()
    firsts = [group[0] for group in launches if group]
    # The first launch of all makes Triton's driver, without a lock; and what Triton keeps of a kernel is lost where two
    # threads launch it for the first time at once.
    rounds = [firsts[:1], firsts[1:], [launch for group in launches for launch in group[1:]]]
    # Triton's interpreter has room for one.
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        with ThreadPoolExecutor(min(THREADS, torch.get_num_threads()), "weft-warm", begin) as threads:
            for some in rounds:
                list(threads.map(run, some))
    else:
        for launch in chain(*rounds):
            run(launch)
    logger.debug("%d kinds of launches are warm after %.1f s", sum(map(len, rounds)), time.monotonic() - began)
