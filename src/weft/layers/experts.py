"""Mixture of experts: a router, and the experts' MLPs with a rank's share of their columns."""

from __future__ import annotations

import torch

from weft.architectures.place import Place
from weft.architectures.shape import Experts
from weft.kernels.batch import Batch
from weft.layers.weights import LayerWeights


class ExpertsBlock:
    """A mixture of experts: the kernels compute a rank's experts at once."""

    def __init__(self, spec: Experts, place: Place, weights: LayerWeights) -> None:
        assert not spec.shared, f"not computed: {spec}"
        self.spec, self.kernels = spec, weights.kernels
        self.router = weights.router("router")
        self.experts = weights.experts("experts", spec, place.experts)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        chosen, shares = self.kernels.pointwise.choose_experts(self.router(x, batch), self.spec)
        return self.experts(x, chosen, shares)
