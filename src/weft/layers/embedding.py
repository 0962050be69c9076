"""The embedding and the output head of a model, each cut along the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.architectures.place import Span
from weft.comm import Group
from weft.kernels.base import EmbeddingTable, Product


class Embedding:
    """Embedding of which this rank holds the rows `vocab`; a token of another rank adds zeros to the sum over ranks.

    Rows are multiplied by `scale`, rounded to their dtype.
    """

    def __init__(self, table: EmbeddingTable, vocab: Span, comm: Group, scale: float = 1.0) -> None:
        self.table, self.vocab, self.comm, self.scale = table, vocab, comm, scale

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed token ids: [T] -> [T, hidden]."""
        rows = self._rows(tokens)
        return rows if self.scale == 1 else rows.mul_(torch.tensor(self.scale, dtype=rows.dtype))

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return self.table.rows(tokens.long())
        local = tokens - self.vocab.start
        is_local = (local >= 0) & (local < len(self.vocab))
        return self.comm.sum(self.table.rows((local * is_local).long()) * is_local[:, None])


class Head:
    """Output head: logits over the whole vocabulary, gathered on the rank that samples.

    `widths[r]` is the number of vocabulary rows of rank r.
    """

    def __init__(self, product: Product, widths: Sequence[int], comm: Group) -> None:
        self.product, self.widths, self.comm = product, widths, comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute logits: [S, hidden] -> [S, vocab] on rank 0 of the group, None on the other ranks."""
        return self.comm.gather(self.product(x), self.widths)
