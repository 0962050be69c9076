"""Mixture of experts: a router, a rank's experts with its share of their columns, and experts that see every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.matrices import ChoosingProduct, FusedMLP
from weft.ranks.layers.exchange import RoutedTokens
from weft.ranks.layers.mlp import multiply_by_gate
from weft.ranks.layers.weights import LayerWeights


class ExpertsBlock:
    """A mixture of experts: the kernels compute a rank's experts at once.

    If other ranks have experts that tokens of this rank choose, they compute these: on the same tokens within an
    attention group, else on the tokens that the `exchange` brings.
    """

    def __init__(self, spec: Experts, place: Place, weights: LayerWeights) -> None:
        self.spec, self.kernels, self.exchange = spec, weights.kernels, weights.exchange
        self.router = weights.router("router")
        router: object = self.router.weight
        self.choose_experts = router.choose_experts if isinstance(router, ChoosingProduct) else self._choose_by_scores
        self.correction = weights.vector("router.correction") if spec.correction else None
        self.experts = weights.experts("experts", spec, place)
        self.shared = SharedExperts(spec, weights) if spec.shared else None
        self.together = None  # routed and shared experts in one pass
        if self.shared and self.exchange is None:
            self.together = self.kernels.matrices.mixture(self.experts, self.shared.products)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        slots = batch.slots if batch.fixed else None
        tokens = RoutedTokens(x, *self.choose_experts(x, self.spec, slots, self.correction))
        if self.together and self.shared and len(x) <= self.together.most_tokens:
            return self.together(*tokens, self.shared.gate(x, batch))
        if self.exchange is None:
            routed = self.experts(*tokens)
        else:
            received = self.exchange.dispatch(tokens, batch.group_tokens, static=batch.fixed)
            routed = self.exchange.combine(self.experts(*received))
        return routed if self.shared is None else routed + self.shared(x, batch)

    def _choose_by_scores(
        self, x: torch.Tensor, spec: Experts, slots: torch.Tensor | None, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.pointwise.choose_experts(self.router(x), spec, slots, correction)

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can hold this block."""
        return self.experts.capturable and (self.exchange is None or self.exchange.capturable)

    def serve_others(self, group_tokens: Sequence[int], like: torch.Tensor) -> None:
        """Compute this rank's experts on the tokens of the other attention groups; this group has none.

        `like` [hidden] has the dtype and the device of tokens.
        """
        assert self.exchange
        none = torch.empty(0, self.spec.top_k, device=like.device)
        tokens = RoutedTokens(like.new_empty(0, len(like)), none.long(), none)
        self.exchange.combine(self.experts(*self.exchange.dispatch(tokens, group_tokens)))


class SharedExperts:
    """The experts that see every token, together one MLP."""

    def __init__(self, spec: Experts, weights: LayerWeights) -> None:
        self.spec, self.kernels = spec, weights.kernels
        self.gate_up, self.down = weights.column_linear("shared.gate_up"), weights.row_linear("shared.down")
        self.weigher = weights.router("shared.gate") if spec.shared_gate else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        out = self.down(multiply_by_gate(self.gate_up(x, batch), self.spec.activation, self.kernels), batch)
        gate = self.gate(x, batch)
        return out if gate is None else out * gate.sigmoid().to(out.dtype)

    def gate(self, x: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """Numbers whose sigmoids multiply the results: [T, hidden] -> [T, 1] float32."""
        return None if self.weigher is None else self.weigher(x, batch)

    @property
    def products(self) -> FusedMLP:
        return FusedMLP(self.gate_up.weight, self.down.weight)
