"""Speed of Weft's own kernels on this machine's cores; the library is called as the ranks call it.

The parts of decode and prefill are measured separately: products with weights of 16, 8 and 4 bits that come from
memory, for a few tokens and for many; attention over a cache and over a prompt; and the operations on rows in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from ctypes import byref
from itertools import accumulate, count
from pathlib import Path

import numpy as np

from weft.checkpoint.quantised.schemes import Scheme
from weft.machine.hardware.cpu import TOKENS, KernelSpeed, ProductSpeed
from weft.machine.hardware.cpus import HELD, bytes_of
from weft.machine.native import library
from weft.machine.native.entries import Entries
from weft.machine.native.structures import LOWEST_KINDS, PANEL, MatrixDescriptor

ROUNDS_S = 0.4  # seconds for all measurements in turn: the best of each counts, since others may have been disturbed
COLS = 2048
OWN_ROWS = 1024  # rows per core of the matrix for many tokens
MANY = 128  # tokens
# Attention of 4 KV heads with 2 query heads each: READING sequences whose caches have CACHED bytes in all, and one
# prompt of PROMPT tokens.
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 4, 64, 16
READING, PROMPT = 8, 1024
CACHED = 64 << 20
SOME = 0x3C  # a byte; two of them are 0.0115 in bfloat16 and 1.06 in float16

Run = Callable[[], object]


class MeasuredKernels:
    """The measured entries of the library. Weights and caches lie in `memory`; their values do not matter."""

    def __init__(self, path: str, threads: int, memory: np.ndarray) -> None:
        self._entries = Entries(library.open_library(Path(path)), library.DEFAULT_DTYPE, lambda: threads)
        self.memory = memory

    def product(self, scheme: Scheme | None, rows: int, tokens: int) -> Run:
        """Multiply `tokens` tokens with a matrix [rows, COLS] at the beginning of the memory."""
        at, numbers = self.memory.ctypes.data, rows * COLS
        matrix = MatrixDescriptor(rows=rows, cols=COLS, data=at)
        if scheme:
            scales = at + numbers * scheme.bits // 8
            matrix.bits, matrix.group, matrix.kind = scheme.bits, scheme.group, LOWEST_KINDS[scheme.lowest]
            matrix.scales, matrix.lowest = scales, scales + numbers // scheme.group * 2
        x, out = filled(tokens, COLS), filled(tokens, rows)
        return lambda: self._entries.product(byref(matrix), x.ctypes.data, tokens, out.ctypes.data)

    def attention(self, rows: int, length: int, tokens: int) -> Run:
        """Attention of the last `tokens` of `rows` sequences of `length` tokens (a multiple of BLOCK), side by side."""
        q, out = (filled(rows * tokens, Q_HEADS * HEAD_DIM) for _ in range(2))
        starts = np.arange(rows + 1, dtype=np.int32) * np.int32(tokens)
        context = np.full(rows, length, np.int32)
        tables = np.arange(rows * length // BLOCK, dtype=np.int32)
        keys = self.memory.ctypes.data
        values = keys + rows * length * KV_HEADS * HEAD_DIM * 2
        sizes = length // BLOCK, rows, BLOCK, Q_HEADS, KV_HEADS, HEAD_DIM, 0

        def attend() -> object:
            arrays = (array.ctypes.data for array in (out, starts, context, tables))
            return self._entries.attend(q.ctypes.data, keys, values, *arrays, *sizes, HEAD_DIM**-0.5, None, None, False)

        return attend

    def silu_mul(self, rows: int) -> Run:
        """SiLU and multiplication of an array [rows, 2 * COLS]."""
        gate_up, out = filled(rows, 2 * COLS), filled(rows, COLS)
        return lambda: self._entries.silu_mul(gate_up.ctypes.data, out.ctypes.data, rows, COLS)


def measure(path: str, cores: Sequence[int], memory: np.ndarray) -> KernelSpeed:
    """Measure the library at `path` with one thread for each of `cores`.

    `memory` is an array of bytes of the value SOME, larger than the caches. Raises OSError or AttributeError for a
    library of another kind.
    """
    kernels = MeasuredKernels(path, len(cores), memory)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores))

    def rows_of(scheme: Scheme | None, tokens: int) -> int:
        # The more tokens, the fewer weights suffice to measure the time of a token.
        return int(memory.nbytes / tokens**0.5 / bytes_of(scheme) / COLS) // PANEL * PANEL

    rows = [[rows_of(scheme, tokens) for tokens in TOKENS] for scheme in HELD]
    own = min(OWN_ROWS * len(cores), rows_of(None, 1))
    length = min(memory.nbytes, CACHED) // (4 * KV_HEADS * HEAD_DIM * READING) // BLOCK * BLOCK
    runs = [kernels.attention(READING, length, 1), kernels.attention(1, PROMPT, PROMPT), kernels.silu_mul(MANY)]
    for scheme, counts in zip(HELD, rows, strict=True):
        runs += [kernels.product(scheme, *sizes) for sizes in zip(counts, TOKENS, strict=True)]
        runs.append(kernels.product(scheme, own, MANY))
    reading, prompt, between, *times = best(runs)
    products = []
    for scheme, counts in zip(HELD, rows, strict=True):
        *few, many = (times.pop(0) for _ in range(len(TOKENS) + 1))
        # More tokens never take less time.
        seconds = accumulate((time / (count * COLS) for time, count in zip(few, counts, strict=True)), max)
        products.append(
            ProductSpeed(
                bits=scheme.bits if scheme else 16,
                weights_Bps=tuple(bytes_of(scheme) / time for time in seconds),
                matmul_flops=2 * own * COLS * MANY / many,
            )
        )
    return KernelSpeed(
        products=tuple(products),
        cache_Bps=READING * length * 4 * KV_HEADS * HEAD_DIM / reading,
        attention_flops=PROMPT * PROMPT / 2 * 4 * Q_HEADS * HEAD_DIM / prompt,
        rows_Bps=3 * MANY * COLS * 2 / between,
    )


def filled(rows: int, cols: int) -> np.ndarray:
    """Activations [rows, cols] in bfloat16."""
    return np.full((rows, cols), SOME * 0x101, np.uint16)


def best(runs: Sequence[Run]) -> list[float]:
    """Shortest seconds of each run. The runs take turns, at least two; the first turn warms up."""
    deadline, shortest = time.perf_counter() + ROUNDS_S, [float("inf")] * len(runs)
    for turn in count():
        if turn > 1 and time.perf_counter() > deadline:
            break
        for number, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            shortest[number] = min(shortest[number], time.perf_counter() - begin)
    return shortest
