"""Mixture of experts: a router, and a rank's experts with its share of their columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.architectures.place import Place
from weft.architectures.shape import Experts
from weft.kernels.batch import Batch
from weft.layers.exchange import RoutedTokens
from weft.layers.mlp import multiply_by_gate
from weft.layers.weights import LayerWeights


class ExpertsBlock:
    """A mixture of experts in torch: tokens are sorted by expert, and each expert computes its own in one product.

    If other ranks have experts that tokens of this rank choose, they compute these: on the same tokens within an
    attention group, else on those that the `exchange` brings.
    """

    def __init__(self, spec: Experts, place: Place, weights: LayerWeights) -> None:
        assert not spec.shared, f"not computed: {spec}"
        self.spec, self.kernels, self.held = spec, weights.kernels, place.experts
        self.exchange = weights.exchange
        self.router = weights.column_linear("router")
        self.gate_up = weights.grouped_column_linear("experts.gate_up", len(place.experts))
        # Of the ranks that divide the columns of the same experts, the first adds the biases.
        first = place.expert_ffn.start == 0
        self.down = weights.grouped_row_linear("experts.down", len(place.experts), adds_bias=first)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden], to be summed over the ranks."""
        tokens = RoutedTokens(x, *choose_experts(self.router(x, batch), self.spec))
        if self.exchange is None:
            return self.compute(tokens)
        return self.exchange.combine(self.compute(self.exchange.dispatch(tokens, batch.group_tokens)))

    def serve_others(self, group_tokens: Sequence[int], like: torch.Tensor) -> None:
        """Compute this rank's experts on the tokens of the other attention groups; this group has none.

        `like` [hidden] has the dtype and the device of tokens.
        """
        assert self.exchange
        none = like.new_empty(0, self.spec.top_k)
        tokens = RoutedTokens(like.new_empty(0, len(like)), none.long(), none)
        self.exchange.combine(self.compute(self.exchange.dispatch(tokens, group_tokens)))

    def compute(self, tokens: RoutedTokens) -> torch.Tensor:
        """Sum what this rank's experts make of each token: [T, hidden], zeros for a token that chose none of them."""
        x, chosen, shares = tokens
        held, choices = len(self.held), chosen.flatten() - self.held.start
        # Choices of other ranks' experts come last, and are left out.
        choices = torch.where((choices >= 0) & (choices < held), choices, held)
        offsets = [0, *choices.bincount(minlength=held + 1)[:held].cumsum(0).tolist()]
        parts = x.new_zeros(chosen.numel(), x.shape[1])
        if offsets[-1]:
            order = choices.argsort(stable=True)[: offsets[-1]]
            up = self.gate_up(x[order // self.spec.top_k], offsets)
            parts[order] = self.down(multiply_by_gate(up, self.spec.activation, self.kernels), offsets)
        # A token's experts are added in the order of their shares, whatever other tokens are in the batch.
        return (parts.view(*chosen.shape, x.shape[1]) * shares[..., None]).sum(dim=1)


def choose_experts(scores: torch.Tensor, spec: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by the router's scores [T, experts]: their numbers and shares, [T, top_k]."""
    shares, chosen = scores.softmax(dim=-1, dtype=torch.float32).topk(spec.top_k, dim=-1)
    if spec.normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return chosen, shares.to(scores.dtype)
