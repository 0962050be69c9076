"""Random matrices, quantised."""

from __future__ import annotations

import torch

from weft.architectures.place import Span
from weft.formats.schemes import SCHEMES
from weft.quant.quantised import QuantisedWeight
from weft.weights.quantised import quantise

CPU = torch.device("cpu")
# Those that kernels tell apart; of what is published, zero points of 4 bits, and rows that are one group.
KINDS = (*SCHEMES, "INT4_128", "INT8_ROW_SYM")


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
