"""Dummy weights: random values of a known shape, the same in every layout."""

from __future__ import annotations

from hashlib import blake2b

import torch

from weft.checkpoint.architectures.place import Span
from weft.ranks.quant.quantised import QuantisedWeight

STD = 0.02  # the usual `initializer_range` of Transformers
BLOCK = (
    1 << 18
)  # elements that share a seed, in whole rows: small, so that a rank that needs few rows generates few others


class DummyWeights:
    """A `WeightSource` of random values, which depend only on `seed`, the tensor's name and the kind of device.

    `dims` are the dims of every whole tensor, by name.
    """

    def __init__(self, dims: dict[str, tuple[int, ...]], seed: int) -> None:
        self.dims, self.seed = dims, seed

    def nbytes(self, source: str) -> int:
        """Return 0: nothing is read."""
        return 0

    def dtype(self, source: str) -> torch.dtype:
        """Return float32, the dtype in which values are drawn."""
        return torch.float32

    def holds(self, source: str, scheme: str) -> bool:
        """Return False: no tensor is stored."""
        return False

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        """Return False: no tensor is stored."""
        return False

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Fill `into` with source[rows, cols]: ones for norms, else normal with standard deviation STD."""
        dims = self.dims[source]
        if len(dims) == 1 and source.endswith(".weight"):
            into.fill_(1)
            return
        width = dims[1] if len(dims) == 2 else 1
        step = max(1, BLOCK // width)
        generator = torch.Generator(into.device)
        for block in range(rows.start // step, -(-rows.stop // step)):
            first, last = block * step, min((block + 1) * step, dims[0])
            name = f"{self.seed}:{source}:{block}".encode()
            generator.manual_seed(int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1)
            values = torch.empty(last - first, *dims[1:], device=into.device).normal_(0, STD, generator=generator)
            start, stop = max(first, rows.start), min(last, rows.stop)
            values = values[start - first : stop - first]
            into[start - rows.start : stop - rows.start].copy_(
                values if cols is None else values[:, cols.start : cols.stop]
            )
