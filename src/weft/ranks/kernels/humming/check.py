"""Comparison of the library's products with what the weights stand for, before the first request: its kernels are
compiled for this card on this machine, where their results have never been checked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.experts import activate
from weft.ranks.kernels.humming.products import HummingExperts, HummingMatrix
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.quant.quantised import QuantisedWeight

SAMPLES = 64  # rows of a result that are compared, spread over all of it
BAND_BYTES = 64 << 20  # of W in float32 at once
SEED = 20
COLUMNS = 64  # of the result that are judged together: as many rows of W lie together in the library's layout
ROUNDING = 2.0**-8  # of the result, to the dtype of activations
# The most by which the library's result may differ, of the norm of such columns, besides its own rounding. It rounds
# weights, scales and minima to 16 bits one after the other, each by 2^-9 at most: about half a percent in all, experts
# twice that. One wrong column of COLUMNS makes 17 percent.
TOLERANCE = 0.03


def difference(got: torch.Tensor, want: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """The greatest difference of COLUMNS of a result [T, n], as a share of their norm without the bias, or of the mean
    of all, if that is more."""
    product = want if bias is None else want - bias.float()
    error, rounded, norms = (block_norms(part) for part in (got.float() - want, want * ROUNDING, product))
    share = (error - rounded).clamp(min=0) / norms.maximum(norms.mean()).clamp(min=1e-30)
    return float(share.nan_to_num(torch.inf, torch.inf).max())


def block_norms(values: torch.Tensor) -> torch.Tensor:
    """Norms of COLUMNS of [T, n] each."""
    padded = F.pad(values, (0, -values.shape[1] % COLUMNS))
    return padded.unflatten(1, (-1, COLUMNS)).norm(dim=(0, 2))


def matrix_difference(product: HummingMatrix, weight: QuantisedWeight, bias: torch.Tensor | None, most: int) -> float:
    """`difference` of a product with the weight, the greatest of all tiles for up to `most` rows of x."""
    worst = 0.0
    for rows in product.weight.tiles.firsts(most):
        x, some = draw(rows, weight.shape[1], weight), sample(rows, weight.device)
        worst = max(worst, difference(product(x)[some], multiply_exactly(x[some], weight, bias), bias))
    return worst


def experts_difference(experts: HummingExperts, gate_up: ExpertStack, down: ExpertStack, most: int) -> float:
    """`difference` of the first and the last experts of a rank together, the greatest of all tiles for up to `most`
    tokens."""
    spec, held = experts.spec, experts.down.experts
    numbers = sorted({*range(min(held, spec.top_k)), held - 1})
    worst = 0.0
    for tokens in experts.firsts(most):
        x = draw(tokens, gate_up.weight.shape[-1], gate_up.weight)
        some = sample(tokens, x.device)
        order = torch.arange(tokens * spec.top_k).view(tokens, spec.top_k) % len(numbers)
        chosen = torch.tensor(numbers)[order].to(x.device)
        shares = draw(tokens, spec.top_k, None).abs().to(x.device)
        want = torch.zeros(len(some), x.shape[1], dtype=torch.float32, device=x.device)
        for expert in numbers:
            part = expert_exactly(x[some], spec, gate_up, down, expert)
            want += part * (shares * (chosen == expert))[some].sum(1, keepdim=True)
        worst = max(worst, difference(experts(x, chosen + experts.first, shares)[some], want))
    experts.routed.zero_()
    return worst


def sample(rows: int, device: torch.device) -> torch.Tensor:
    """Numbers of SAMPLES rows, the first and the last among them; of all if there are no more."""
    return torch.linspace(0, rows - 1, min(rows, SAMPLES)).round().long().to(device)


def expert_exactly(
    x: torch.Tensor, spec: Experts, gate_up: ExpertStack, down: ExpertStack, expert: int
) -> torch.Tensor:
    """The MLP of one expert of a rank: [T, hidden] -> [T, hidden] float32."""
    stacks = []
    for stack in (gate_up, down):
        assert isinstance(stack.weight, QuantisedWeight)
        stacks.append((stack.weight.select(0, expert), None if stack.bias is None else stack.bias[expert]))
    return multiply_exactly(activate(multiply_exactly(x, *stacks[0]), spec), *stacks[1])


def multiply_exactly(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias [T, rows], in float32."""
    parts = [x.float() @ band.dequantise().t() for band in bands(weight)]
    out = torch.cat(parts, dim=1)
    return out if bias is None else out + bias.float()


def bands(weight: QuantisedWeight) -> Iterator[QuantisedWeight]:
    """The rows of a matrix, some at a time."""
    rows, cols = weight.shape
    step = max(1, BAND_BYTES // (4 * cols))
    for first in range(0, rows, step):
        yield weight.narrow(0, first, min(step, rows - first))


def draw(rows: int, cols: int, like: QuantisedWeight | torch.Tensor | None) -> torch.Tensor:
    """Numbers [rows, cols], the same at each start; of the device and dtype of activations with a weight.

    SAMPLES rows are random, and the others are multiples of these, each another one.
    """
    generator = torch.Generator().manual_seed(SEED + rows)
    numbers = torch.randn(min(rows, SAMPLES), cols, generator=generator)
    if like is not None:
        numbers = numbers.to(device=like.device, dtype=like.dtype)
    place = torch.arange(rows, device=numbers.device)
    return numbers[place % SAMPLES] * (1 + place[:, None] // SAMPLES / 64).to(numbers.dtype)
