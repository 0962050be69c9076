"""Mixture of experts: a router, and the experts' MLPs with a rank's share of their columns."""

from __future__ import annotations

import torch

from weft.architectures.place import Place
from weft.architectures.shape import Experts
from weft.kernels.base import Kernels
from weft.kernels.batch import Batch
from weft.layers.mlp import ACTIVATIONS, multiply_by_gate
from weft.layers.weights import LayerWeights


class ExpertsBlock:
    """A mixture of experts in torch: tokens are sorted by expert, and each expert computes its own in one product."""

    def __init__(self, spec: Experts, place: Place, weights: LayerWeights) -> None:
        self.spec, self.kernels = spec, weights.kernels
        self.router = weights.column_linear("router")
        self.gate_up = weights.grouped_column_linear("experts.gate_up", len(place.experts))
        self.down = weights.grouped_row_linear("experts.down", len(place.experts))
        self.shared = SharedExperts(spec, weights) if spec.shared else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        chosen, shares = choose_experts(self.router(x, batch), self.spec)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.spec.count)
        offsets = [0, *counts.cumsum(0).tolist()]
        up = self.gate_up(x[order // self.spec.top_k], offsets)
        sorted_parts = self.down(multiply_by_expert_gate(up, self.spec, self.kernels), offsets)
        parts = torch.empty_like(sorted_parts)
        parts[order] = sorted_parts
        # A token's experts are added in the order of their shares, whatever other tokens are in the batch.
        routed = (parts.view(len(x), self.spec.top_k, -1) * shares[..., None]).sum(dim=1)
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


def choose_experts(scores: torch.Tensor, spec: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by the router's scores [T, experts]: their numbers and shares, [T, top_k]."""
    shares, chosen = scores.softmax(dim=-1, dtype=torch.float32).topk(spec.top_k, dim=-1)
    if spec.normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares.to(scores.dtype)


def multiply_by_expert_gate(gate_up: torch.Tensor, spec: Experts, kernels: Kernels) -> torch.Tensor:
    """The activated first half of the columns times the second half, as routed experts have it: [T, 2F] -> [T, F]."""
    if (spec.gain, spec.limit, spec.up_offset) == (1.0, None, 0.0):
        return multiply_by_gate(gate_up, spec.activation, kernels)
    gate, up = gate_up.chunk(2, dim=-1)
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    activated = gate * (gate * spec.gain).sigmoid() if spec.activation == "silu" else ACTIVATIONS[spec.activation](gate)
    return activated * (up + spec.up_offset)
