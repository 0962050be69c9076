"""Mixture of experts: a router, the experts' MLPs with a rank's share of their columns, and experts that see every
token."""

from __future__ import annotations

import torch

from weft.architectures.place import Place
from weft.architectures.shape import Experts
from weft.kernels.batch import Batch
from weft.layers.mlp import multiply_by_gate
from weft.layers.weights import LayerWeights


class ExpertsBlock:
    """A mixture of experts: the kernels compute a rank's experts at once."""

    def __init__(self, spec: Experts, place: Place, weights: LayerWeights) -> None:
        self.spec, self.kernels = spec, weights.kernels
        self.router = weights.router("router")
        self.experts = weights.experts("experts", spec, place.experts)
        self.shared = SharedExperts(spec, weights) if spec.shared else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        chosen, shares = self.kernels.pointwise.choose_experts(self.router(x, batch), self.spec)
        routed = self.experts(x, chosen, shares)
        return routed if self.shared is None else routed + self.shared(x, batch)


class SharedExperts:
    """The experts that see every token, together one MLP."""

    def __init__(self, spec: Experts, weights: LayerWeights) -> None:
        self.spec, self.kernels = spec, weights.kernels
        self.gate_up, self.down = weights.column_linear("shared.gate_up"), weights.row_linear("shared.down")
        self.gate = weights.column_linear("shared.gate") if spec.shared_gate else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        out = self.down(multiply_by_gate(self.gate_up(x, batch), self.spec.activation, self.kernels), batch)
        return out if self.gate is None else out * self.gate(x, batch).sigmoid()
