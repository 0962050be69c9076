"""How fast a CPU reads memory and multiplies matrices: `python -m weft.probes.cpu_speed CORES BYTES [LIBRARY]`.

It prints a `CpuSpeed` as JSON, in less than a second; with the engine's own kernels in it where their library is named.
A process of its own: its memory is given back, and how many threads the matrix library takes is nobody else's business.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import msgspec
import numpy as np

from weft.hardware import cpu
from weft.hardware.cpu import CpuSpeed
from weft.probes import kernel_speed

PASSES_S = 0.15  # of each kind; the best pass counts, others may have been disturbed
DISTURBED = 0.1  # of the cores' time, that others took
ORDER = 512  # of the square matrices: three of them stay in a core's cache


def measure_cores(cores: Sequence[int], size: int, library: str | None = None) -> CpuSpeed:
    """One thread on each of the `cores`, reading `size` bytes together."""
    whole = anonymous_pages(size)
    parts = np.array_split(whole, len(cores))
    with ThreadPoolExecutor(len(cores)) as pool:
        crew = PinnedThreads(pool, cores)
        squares: list[np.ndarray] = [np.empty(0)] * len(cores)

        def fill(number: int) -> None:
            # Touched by the thread that reads them the pages are near its core, and not all one page of zeros.
            parts[number].fill(kernel_speed.SOME * 0x01010101)
            squares[number] = np.full((ORDER, ORDER), 0.5, np.float32)

        # Comparing whole numbers is the reduction that numpy does in as few cycles as loads take.
        crew.run(fill)
        reading = crew.best(lambda number: parts[number].max())
        multiplying = crew.best(lambda number: squares[number] @ squares[number])
    kernels = kernel_speed.measure(library, cores, whole.view(np.uint8)) if library else None
    return CpuSpeed(whole.nbytes / reading, len(cores) * 2 * ORDER**3 / multiplying, kernels=kernels)


def measure_watched(cores: Sequence[int], size: int, library: str | None = None) -> CpuSpeed:
    """The same, and whether others have computed on these cores meanwhile."""
    begin, before, own = time.perf_counter(), cpu.busy_seconds(cores), time.process_time()
    found = measure_cores(cores, size, library)
    took, after, own = time.perf_counter() - begin, cpu.busy_seconds(cores), time.process_time() - own
    others = cpu.load_average() if before is None or after is None else (after - before - own) / (took * len(cores))
    return msgspec.structs.replace(found, busy=others > DISTURBED)


class PinnedThreads:
    """Threads that begin together, each on a core of its own."""

    def __init__(self, pool: ThreadPoolExecutor, cores: Sequence[int]) -> None:
        self.pool, self.cores = pool, cores
        self.barrier = Barrier(len(cores))

    def run(self, work: Callable[[int], object]) -> float:
        """Seconds from the first thread's begin to the last one's end. `work` is told its thread's number."""

        def one(number: int) -> tuple[float, float]:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self.cores[number]})
            self.barrier.wait()
            begin = time.perf_counter()
            work(number)
            return begin, time.perf_counter()

        times = list(self.pool.map(one, range(len(self.cores))))
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def best(self, work: Callable[[int], object]) -> float:
        """The shortest of as many runs as there is time for, and of three at least."""
        deadline, found = time.perf_counter() + PASSES_S, [self.run(work) for _ in range(3)]
        while time.perf_counter() < deadline:
            found.append(self.run(work))
        return min(found)


def anonymous_pages(size: int) -> np.ndarray:
    """Pages of our own, large ones where there are any."""
    pages = mmap.mmap(-1, max(1, size // mmap.PAGESIZE) * mmap.PAGESIZE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    array: np.ndarray = np.frombuffer(pages, dtype=np.int32)
    return array


if __name__ == "__main__":
    speed = measure_watched([int(core) for core in sys.argv[1].split(",")], int(sys.argv[2]), *sys.argv[3:])
    sys.stdout.buffer.write(msgspec.json.encode(speed))
