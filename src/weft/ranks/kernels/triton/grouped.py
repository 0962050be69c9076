"""The steps between two products of a mixture's experts, if another library multiplies: the activation, and the rows in
the form that it takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.triton.pointwise import COLUMNS
from weft.ranks.kernels.triton.routing import SortedRows

NUMBERS = 1024  # numbers of rows that one program of _place_rows writes, and owners that it counts at once


@triton.jit
def _activate(gate_up, out, width, gain, limit, up_offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, inside, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    active = gate / (1.0 + tl.exp(-gain * gate)) * (up + up_offset)
    tl.store(out + row * width + columns, active.to(out.dtype.element_ty), inside)


def activate(gate_up: torch.Tensor, spec: Experts) -> torch.Tensor:
    """`ranks.kernels.experts.activate` of experts with SiLU gates in one launch: [R, 2F] -> [R, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _activate[(rows, triton.cdiv(width, COLUMNS))](
        gate_up,
        out,
        width,
        float(spec.gain),
        math.inf if spec.limit is None else float(spec.limit),
        float(spec.up_offset),
        BLOCK=COLUMNS,
    )
    return out


class RoutedBlocks(NamedTuple):
    """`SortedRows` as other libraries take them. `members` [blocks * size] int32 have the number of all rows after the
    last row of a block; `owners` [blocks] int32; `count` [1] int32, the rows of the blocks that have an owner, padding
    included. These blocks come first."""

    members: torch.Tensor
    owners: torch.Tensor
    count: torch.Tensor


@triton.jit(do_not_specialize=["numbers", "blocks", "rows"])
def _place_rows(members, owners, placed, count, numbers, blocks, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    member = tl.load(members + at, at < numbers, other=-1)
    tl.store(placed + at, tl.where(member < 0, rows, member), at < numbers)
    if tl.program_id(0) == 0:
        owned = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, blocks, BLOCK):
            each = begin + tl.arange(0, BLOCK)
            owned += (tl.load(owners + each, each < blocks, other=-1) >= 0).to(tl.int32)
        tl.store(count, tl.sum(owned, 0) * SIZE)


def place_rows(blocks: SortedRows, rows: int) -> RoutedBlocks:
    """Blocks of `rows` rows in the form of other libraries."""
    members, owners = blocks
    placed, count = torch.empty_like(members), torch.empty(1, dtype=torch.int32, device=owners.device)
    _place_rows[(triton.cdiv(members.numel(), NUMBERS),)](
        members, owners, placed, count, members.numel(), len(owners), rows, SIZE=members.shape[1], BLOCK=NUMBERS
    )
    return RoutedBlocks(placed.flatten(), owners, count)
