"""The MLP of a dense layer, with a rank's share of the columns."""

from __future__ import annotations

import torch

from weft.checkpoint.architectures.shape import Activation, Dense
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.experts import ACTIVATIONS
from weft.ranks.layers.weights import LayerWeights


class MLPBlock:
    """MLP, with a gate or without."""

    def __init__(self, spec: Dense, weights: LayerWeights) -> None:
        self.spec, self.kernels = spec, weights.kernels
        self.up = weights.column_linear("mlp.gate_up" if spec.gated else "mlp.up")
        self.down = weights.row_linear("mlp.down")

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        up = self.up(x, batch)
        if not self.spec.gated:
            return self.down(ACTIVATIONS[self.spec.activation](up), batch)
        return self.down(multiply_by_gate(up, self.spec.activation, self.kernels), batch)


def multiply_by_gate(gate_up: torch.Tensor, activation: Activation, kernels: Kernels) -> torch.Tensor:
    """The activated first half of the columns times the second half: [T, 2F] -> [T, F]."""
    if activation == "silu":
        return kernels.pointwise.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
