"""The embedding and the output head of a model, each cut along the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.checkpoint.architectures.place import Span
from weft.ranks.comm import Group
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.matrices import EmbeddingTable, Product
from weft.ranks.layers.linear import Linear


class Embedding:
    """Embedding of which this rank holds the rows `vocab`; a token of another rank adds zeros to the sum over ranks.

    Rows are multiplied by `scale`, rounded to their dtype, or by the matrix `projection`, if the model has one. Then
    the learned `positions` are added, if the model has them.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        vocab: Span,
        comm: Group,
        scale: float = 1.0,
        *,
        projection: Linear | None = None,
        positions: Positions | None = None,
    ) -> None:
        self.table, self.vocab, self.comm, self.scale = table, vocab, comm, scale
        self.projection, self.positions = projection, positions

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Embed the tokens of a step: [T, hidden]."""
        rows = self._rows(batch.tokens)
        if self.scale != 1:
            rows = rows.mul_(torch.tensor(self.scale, dtype=rows.dtype))
        if self.projection is not None:
            rows = self.projection(rows, batch)
        return rows if self.positions is None else rows + self.positions(batch)

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return self.table.rows(tokens.long())
        local = tokens - self.vocab.start
        is_local = (local >= 0) & (local < len(self.vocab))
        return self.comm.sum(self.table.rows((local * is_local).long()) * is_local[:, None])


class Positions:
    """Learnt embeddings of positions, with `before` rows before position 0's row."""

    def __init__(self, table: EmbeddingTable, before: int) -> None:
        self.table, self.before = table, before

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Embed the positions of a step's tokens: [T, hidden]."""
        return self.table.rows(batch.positions.long() + self.before)


class Head:
    """Output head: logits over the whole vocabulary, gathered on the rank that samples.

    `widths[r]` is the number of vocabulary rows of rank r. The matrix `projection`, if the model has one, leads to the
    length of the head's rows.
    """

    def __init__(
        self, product: Product, widths: Sequence[int], comm: Group, *, projection: Linear | None = None
    ) -> None:
        self.product, self.widths, self.comm, self.projection = product, widths, comm, projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute logits: [S, hidden] -> [S, vocab] on rank 0 of the group, None on the other ranks."""
        if self.projection is not None:
            x = self.projection(x)
        return self.comm.gather(self.product(x), self.widths)
