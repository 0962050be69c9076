"""Random matrices, quantised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.checkpoint.quantised.schemes import SCHEMES
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.quantised import quantise

CPU = torch.device("cpu")
MXFP4 = "MXFP4"
# Those that kernels tell apart, but for MXFP4; published ones with 4-bit zero points, and with rows of one group.
KINDS = (*SCHEMES, "INT4_128", "INT8_ROW_SYM", "FP8_128")
# One with each width and each kind of minimum or scale: these are tested with every cut, the others with some.
TYPICAL_KINDS = ("Q4_1", "Q4_K", "INT8", MXFP4)


def random(
    type: str, rows: int, cols: Span, width: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> QuantisedWeight:
    """Columns of a random matrix, quantised."""
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    into = QuantisedWeight.empty(type, rows, cols, dtype, CPU)

    def read(r: Span, c: Span, out: torch.Tensor) -> None:
        out.copy_(weight[r.start : r.stop, c.start : c.stop])

    quantise(read, Span(0, rows), cols, width, 1, into)
    return into


def random_stacks(
    spec: Experts, hidden: int, dtype: torch.dtype, type: str | None = None, columns: Span | None = None
) -> tuple[ExpertStack, ExpertStack]:
    """Random weights of all experts, of which a rank has `columns`: gate and up, and down, with biases if they have."""
    columns = columns or Span(0, spec.width)
    generator = torch.Generator().manual_seed(3)

    def stack(name: str, rows: int, cols: Span, width: int) -> ExpertStack:
        bias = torch.randn(spec.count, rows, generator=generator).to(dtype) if spec.bias else None
        if type is None:
            weight = torch.randn(spec.count, rows, len(cols), generator=generator) / width**0.5
            return ExpertStack(name, weight.to(dtype), bias)
        parts = [random(type, rows, cols, width, seed=expert, dtype=dtype) for expert in range(spec.count)]
        return ExpertStack(name, stacked(parts), bias)

    return (
        stack("gate_up", 2 * len(columns), Span(0, hidden), hidden),
        stack("down", hidden, columns, spec.width),
    )


def stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """A stack of matrices of the same dims and scheme. Its scales are small: products neither grow nor vanish."""
    halvings = round(math.log2(parts[0].shape[1]) / 2)

    def small(numbers: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(numbers) / 2**halvings if numbers[0].is_floating_point() else torch.stack(numbers)

    lowest = [part.lowest for part in parts if part.lowest is not None]
    scales = small([part.scales for part in parts])
    return replace(
        parts[0],
        values=torch.stack([part.values for part in parts]),
        scales=scales - halvings if parts[0].type == MXFP4 else scales,
        lowest=small(lowest) if lowest else None,
    )
