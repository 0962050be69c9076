"""Tokens in, logits out: the two ends of a model, cut along the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from weft.comm import Comm
from weft.planner.place import Span
from weft.quant.dense import product


class Embedding:
    """Rows `vocab` of the table; ids of other ranks contribute zeros to the sum."""

    def __init__(self, weight: torch.Tensor, vocab: Span, comm: Comm) -> None:
        self.weight, self.vocab, self.comm = weight, vocab, comm

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T] ids -> [T, hidden]."""
        if self.comm.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.vocab.start
        mine = (local >= 0) & (local < len(self.vocab))
        return self.comm.sum(F.embedding(local * mine, self.weight) * mine[:, None])


class Head:
    """Logits over the whole vocabulary, gathered where they are sampled."""

    def __init__(self, weight: torch.Tensor, widths: Sequence[int], comm: Comm) -> None:
        self.product, self.widths, self.comm = product(weight), widths, comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """[S, hidden] -> [S, vocab] on the group's rank 0, None on the others."""
        return self.comm.gather(self.product(x), self.widths)
