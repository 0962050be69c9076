"""Tile sizes of the attention kernels: the defaults, and the candidates that `weft bench calibrate MODEL` and
`scripts/gpu_check attention` measure.

The block table says where a tile's keys are, and Triton's pipelining counts that look-up as a load of its own. 3 or 4
`stages` therefore load one tile while the one before is worked on, 5 or 6 load two, 7 three. With bf16 heads of 128 a
tile of 64 keys is 32 KiB with its values, copied past the registers 16 bytes at a time. Two programs on each of an
H200's 132 multiprocessors have 8 MiB in flight; 4.8 TB/s at a latency of 0.8 us need 4 MB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tuning:
    """Sizes of one attention kernel: `tile` keys at a time, `warps` warps, `stages` of Triton's pipelining.

    For decode, contexts are split until each multiprocessor has `programs` programs. For prefill, a program has `rows`
    rows, which are queries times heads.
    """

    tile: int
    warps: int
    stages: int
    programs: int = 0
    rows: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value)


# Splits even out contexts of different length, and cost a pass over their results. Time beyond the time to read the
# bytes, computed for 2, 4, 8, 32 programs, 8 KV heads, contexts of 100 to 2,048 and an H200 (docs/negative-results.md):
# 16 rows 56, 46, 53, 193 %; 64 rows 21, 17, 14, 19 %; 256 rows 5, 5, 5, 4 %.
DECODE = Tuning(tile=64, warps=4, stages=3, programs=4)
PREFILL = Tuning(tile=64, warps=8, stages=3, rows=128)
DECODE_CANDIDATES = (
    DECODE,
    replace(DECODE, programs=2),
    replace(DECODE, programs=8),
    replace(DECODE, stages=5),
    replace(DECODE, warps=2),
    replace(DECODE, warps=8),
    replace(DECODE, tile=32, warps=2, stages=5),
    replace(DECODE, tile=32, stages=7),
    replace(DECODE, tile=128),
    replace(DECODE, tile=128, warps=8),
)
PREFILL_CANDIDATES = (
    PREFILL,
    replace(PREFILL, warps=4, rows=64),
    replace(PREFILL, stages=5),
    replace(PREFILL, tile=128),
    replace(PREFILL, tile=32, stages=5),
)


@dataclass(frozen=True)
class Tunings:
    """Sizes for a device: for prefill, and for decode by the numbers of rows that were measured."""

    decode: dict[int, Tuning]
    prefill: Tuning

    def for_rows(self, rows: int) -> Tuning:
        """Sizes for a decode step of `rows` rows: from the nearest number of rows that was measured."""
        return self.decode[min(self.decode, key=lambda measured: max(measured, rows) / min(measured, rows))]


DEFAULT = Tunings({1: DECODE}, PREFILL)
