"""Measurement of a CPU's memory bandwidth and FLOPS: `python -m weft.probes.cpu_speed CORES BYTES [LIBRARY]`.

It prints a `CpuSpeed` as JSON within a second. With LIBRARY, the path of the compiled kernels, the `CpuSpeed` includes
their speeds. It runs in a process of its own: its memory is freed at the end, and its threads affect nothing else.
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

from weft.machine.hardware import cpu
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.native.pages import map_pages
from weft.probes import kernel_speed

PASSES_S = 0.15  # seconds for the passes of each kind; the fastest pass counts, since other processes may disturb some
DISTURBED = 0.1  # share of the cores' time taken by other processes, above which the machine counts as busy
ORDER = 512  # order of the square matrices: three of them stay in a core's cache


def measure_cores(cores: Sequence[int], size: int, library: str | None = None) -> CpuSpeed:
    """Measure with one thread on each of `cores`, which together read `size` bytes."""
    whole = anonymous_pages(size)
    parts = np.array_split(whole, len(cores))
    with ThreadPoolExecutor(len(cores)) as pool:
        threads = PinnedThreads(pool, cores)
        squares: list[np.ndarray] = [np.empty(0)] * len(cores)

        def fill(number: int) -> None:
            # Pages that the reading thread touches first lie near its core, and are not all one page of zeros.
            parts[number].fill(kernel_speed.SOME * 0x01010101)
            squares[number] = np.full((ORDER, ORDER), 0.5, np.float32)

        threads.time_once(fill)
        # The maximum of integers is a reduction for which numpy needs no more cycles than the loads take.
        reading_s = threads.best_time(lambda number: parts[number].max())
        multiplying_s = threads.best_time(lambda number: squares[number] @ squares[number])
    kernels = kernel_speed.measure(library, cores, whole.view(np.uint8)) if library else None
    return CpuSpeed(whole.nbytes / reading_s, len(cores) * 2 * ORDER**3 / multiplying_s, kernels=kernels)


def measure_watched(cores: Sequence[int], size: int, library: str | None = None) -> CpuSpeed:
    """Measure as `measure_cores`, and record in `busy` if other processes computed on these cores during the
    measurement."""
    begin, before, own_before = time.perf_counter(), cpu.busy_seconds(cores), time.process_time()
    speed = measure_cores(cores, size, library)
    seconds, after = time.perf_counter() - begin, cpu.busy_seconds(cores)
    own = time.process_time() - own_before
    if before is None or after is None:
        others = cpu.load_average()
    else:
        others = (after - before - own) / (seconds * len(cores))
    return msgspec.structs.replace(speed, busy=others > DISTURBED)


class PinnedThreads:
    """Threads that begin together, each pinned to a core of its own."""

    def __init__(self, pool: ThreadPoolExecutor, cores: Sequence[int]) -> None:
        self.pool, self.cores = pool, cores
        self.barrier = Barrier(len(cores))

    def time_once(self, work: Callable[[int], object]) -> float:
        """Run `work(number)` on each thread; return seconds from the first start to the last end."""

        def run_thread(number: int) -> tuple[float, float]:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self.cores[number]})
            self.barrier.wait()
            begin = time.perf_counter()
            work(number)
            return begin, time.perf_counter()

        times = list(self.pool.map(run_thread, range(len(self.cores))))
        return max(end for _, end in times) - min(begin for begin, _ in times)

    def best_time(self, work: Callable[[int], object]) -> float:
        """Shortest seconds over three runs or more, as many as fit into PASSES_S."""
        deadline = time.perf_counter() + PASSES_S
        times = [self.time_once(work) for _ in range(3)]
        while time.perf_counter() < deadline:
            times.append(self.time_once(work))
        return min(times)


def anonymous_pages(size: int) -> np.ndarray:
    """Array of int32 over new anonymous pages of `size` bytes, huge pages if the system has them."""
    pages = map_pages(max(1, size // mmap.PAGESIZE) * mmap.PAGESIZE)
    array: np.ndarray = np.frombuffer(pages, dtype=np.int32)
    return array


if __name__ == "__main__":
    speed = measure_watched([int(core) for core in sys.argv[1].split(",")], int(sys.argv[2]), *sys.argv[3:])
    sys.stdout.buffer.write(msgspec.json.encode(speed))
