"""Sizes of the attention kernels: what runs where none were measured, and what is measured, by `weft bench calibrate
MODEL` and `scripts/gpu_check attention`.

A tile's keys lie where the block table says, and Triton's pipelining counts that look-up as a load of its own: of
`stages`, 3 and 4 keep one tile on its way while the one before is worked on, 5 and 6 two, 7 three. For bf16 heads of
128 a tile of 64 keys is 32 KiB with its values, all of it copied past the registers 16 bytes at a time: two programs on
each of an H200's 132 multiprocessors have 8 MiB on their way, and 4.8 TB/s at 0.8 us ask for 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tuning:
    """`tile` keys at a time, by `warps` warps, in `stages` of Triton's pipelining. Of decode, contexts are split until
    each multiprocessor has `programs`; of prompts, a program has `rows`, queries times heads."""

    tile: int
    warps: int
    stages: int
    programs: int = 0
    rows: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value)


# Splits cost a pass over their results, and even out contexts that differ. What that makes beyond the bytes' own time,
# reckoned for 2, 4, 8, 32 programs, 8 KV heads, contexts of 100 to 2,048, an H200 (docs/negative-results.md): 16 rows
# 56, 46, 53, 193 %; 64 rows 21, 17, 14, 19 %; 256 rows 5, 5, 5, 4 %.
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
    """What runs: prompts by one, decode steps by that of the measured number of rows that is nearest to theirs."""

    decode: dict[int, Tuning]
    prefill: Tuning

    def for_rows(self, rows: int) -> Tuning:
        """For a decode step of so many rows."""
        return self.decode[min(self.decode, key=lambda known: max(known, rows) / min(known, rows))]


DEFAULT = Tunings({1: DECODE}, PREFILL)
