"""Tokens in, logits out: the two ends of a model, cut along the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.architectures.place import Span
from weft.comm import Comm
from weft.kernels.base import EmbeddingTable, Product


class Embedding:
    """Rows `vocab` of the table; ids of other ranks contribute zeros to the sum."""

    def __init__(self, table: EmbeddingTable, vocab: Span, comm: Comm) -> None:
        self.table, self.vocab, self.comm = table, vocab, comm

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T] ids -> [T, hidden]."""
        if self.comm.size == 1:
            return self.table.rows(tokens.long())
        local = tokens - self.vocab.start
        mine = (local >= 0) & (local < len(self.vocab))
        return self.comm.sum(self.table.rows((local * mine).long()) * mine[:, None])


class Head:
    """Logits over the whole vocabulary, gathered where they are sampled."""

    def __init__(self, product: Product, widths: Sequence[int], comm: Comm) -> None:
        self.product, self.widths, self.comm = product, widths, comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """[S, hidden] -> [S, vocab] on the group's rank 0, None on the others."""
        return self.comm.gather(self.product(x), self.widths)
