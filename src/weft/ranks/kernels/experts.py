"""Mixtures of experts in torch, with products of any kernels: the reference for kernels that compute all experts at
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.shape import Activation, Experts
from weft.ranks.kernels.matrices import Product

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
MIN_SUM = 1e-20  # added to a sum that shares are divided by: the sigmoids of a token may all be 0


class GroupedExperts:
    """`ExpertProducts` for each expert separately: tokens are sorted by expert, and each expert computes its own in one
    product. The number of tokens of each expert is read on the host."""

    capturable = False

    def __init__(self, spec: Experts, gate_up: Sequence[Product], down: Sequence[Product], first: int) -> None:
        self.spec, self.gate_up, self.down = spec, gate_up, down
        self._numbers = range(first, first + len(gate_up))
        self.routed = torch.zeros(len(gate_up), dtype=torch.int64)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        # -1 comes before the first expert.
        offsets = (flat + 1).bincount(minlength=self.spec.count + 1).cumsum(0).tolist()
        self.routed += torch.tensor([offsets[expert + 1] - offsets[expert] for expert in self._numbers])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # In the order of experts, so that the order of a token's sum does not depend on the batch.
        for expert, gate_up, down in zip(self._numbers, self.gate_up, self.down, strict=True):
            rows = order[offsets[expert] : offsets[expert + 1]]
            if len(rows):
                tokens = rows // chosen.shape[1]
                part = down(activate(gate_up(x[tokens]), self.spec))
                total[tokens] += part * shares.flatten()[rows, None]
        return total.to(x.dtype)


def activate(gate_up: torch.Tensor, spec: Experts) -> torch.Tensor:
    """The activated first half of the columns times the second half, as routed experts have it: [T, 2F] -> [T, F]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    activated = gate * (gate * spec.gain).sigmoid() if spec.activation == "silu" else ACTIVATIONS[spec.activation](gate)
    return (activated * (up + spec.up_offset)).to(gate_up.dtype)


def choose_experts(
    scores: torch.Tensor, spec: Experts, slots: torch.Tensor | None = None, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Pointwise.choose_experts` in torch."""
    weights = scores.sigmoid() if spec.scoring == "sigmoid" else scores.softmax(dim=-1)
    ranked = weights if correction is None else weights + correction
    if spec.groups > 1:
        ranked = ranked.masked_fill(~_in_best_groups(ranked, spec), -torch.inf)
    # Stable: of equal weights, the lower number comes first.
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    shares = weights.gather(1, chosen)
    if spec.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + MIN_SUM)
    shares = shares * spec.scaling
    if slots is not None:
        chosen = chosen.masked_fill(slots[:, None] < 0, -1)
    return chosen, shares


def is_plain_choice(spec: Experts) -> bool:
    """Return True for a softmax over all experts, of which the highest weights are taken."""
    return spec.scoring == "softmax" and spec.groups == 1 and not spec.correction and spec.scaling == 1.0


def _in_best_groups(weights: torch.Tensor, spec: Experts) -> torch.Tensor:
    """True for the experts of each token's best groups: [T, experts] -> [T, experts]. The lower group wins a tie."""
    grouped = weights.unflatten(1, (spec.groups, -1))
    scores = grouped.topk(2 if spec.group_score == "top2" else 1, dim=-1).values.sum(dim=-1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    takes_part = (best[:, :, None] == torch.arange(spec.groups, device=best.device)).any(dim=1)
    return takes_part.repeat_interleave(grouped.shape[2], dim=1)
