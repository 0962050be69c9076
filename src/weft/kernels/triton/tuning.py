"""Sizes of the attention kernels: what runs, and what else is worth measuring (`scripts/gpu_check attention`).

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


# Two programs hide each other's waiting; a split costs a pass over its result. More of them even out contexts that
# differ: all of a row that is not split is one program's, however long it is.
DECODE = Tuning(tile=64, warps=4, stages=3, programs=2)
PREFILL = Tuning(tile=64, warps=8, stages=3, rows=128)
DECODE_CANDIDATES = (
    DECODE,
    replace(DECODE, programs=4),
    replace(DECODE, programs=32),
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
