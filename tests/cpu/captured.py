"""Groups of threads whose exchanges a graph of the stand-in for CUDA (fake_cuda.py) may hold, as NCCL's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.cpu.fake_cuda import CUDA, OnCard, card
from weft.ranks.comm import threads

Waiting = threads.ThreadGroup


class Captured(Waiting):
    """Exchanges on the card, recorded in a graph while one is captured; other operations wait for the card."""

    capturable = True

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._on_card(x, lambda held: Waiting.sum(self, held), x)

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        out = x.new_empty(sum(sizes), *x.shape[1:])
        return self._on_card(x, lambda held: Waiting.all_gather(self, held, sizes), out)

    def reduce_scatter(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        out = x.new_empty(sizes[self.rank], *x.shape[1:])
        return self._on_card(x, lambda held: Waiting.reduce_scatter(self, held, sizes), out)

    def _on_card(
        self, x: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        """Fill `out` with the result of `exchange`, now or at each replay. All ranks wait for each other meanwhile."""
        assert isinstance(x, OnCard) and isinstance(out, OnCard)

        def run() -> None:
            self._device = torch.device("cpu")
            result = exchange(x.held)
            self._device = CUDA
            if result is not out.held:
                out.held.copy_(result)

        if card.captures():
            card.record(run, [])
        else:
            run()
        return out
