"""Random: the stream of each request, and the race that draws a token with it.

A stream is a function of (key, position) alone and has no state, so a token does not depend on what else is
in the batch, on the batch's order, or on how the model is cut.

Inverting one cumulative distribution with one uniform would not hold that promise: rounding in the logits
differs from layout to layout, moves every border of the distribution a little, and in its long flat tail a
border need not move far to give another token. In a race, token i takes an exponential time with rate
weight[i] and the first one wins: P(i) = weight[i] / sum(weight), and rounding matters only where the first two
come in together. It is run twice, over blocks of tokens and within the block that won, so a row needs
V / 256 + 256 random numbers instead of V.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from weft.kernels import streams
from weft.kernels.streams import SAMPLING_BLOCK

# As signed 64-bit integers: products wrap, in numpy's arrays and in torch.
STEP, FIRST, SECOND = (
    number - 2**64 for number in (streams.SPLITMIX_STEP, streams.SPLITMIX_FIRST, streams.SPLITMIX_SECOND)
)

Integers = TypeVar("Integers", np.ndarray, torch.Tensor)


def seeds(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The stream of each (key, position): [R] uint64 and [R] int64 in, [R] int64 out."""
    return _mix(_mix(keys.view(np.int64)) + positions * np.int64(STEP))


def exponentials(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers of each stream: [R] int64 in, [R, count] float64 out, above 0, mean 1."""
    counter = torch.arange(1, count + 1, device=seeds.device) * STEP
    bits = _shift(_mix(seeds[:, None] + counter), 12)
    # The middle of one of 2**52 equal cells: neither 0 nor 1, so never an infinite time or none at all.
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums over SAMPLING_BLOCK tokens at a time: [R, V] to [R, ceil(V / SAMPLING_BLOCK)], the same in any batch."""
    tokens = weights.shape[1]
    blocks = tokens // SAMPLING_BLOCK
    whole = blocks * SAMPLING_BLOCK
    sums = weights[:, :whole].unflatten(1, (blocks, SAMPLING_BLOCK)).sum(-1)
    if whole < tokens:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return sums


def race(weights: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """One token per row with probability weight / sum of weights: [R, V] float32 and [R] int64 in, [R] int64 out.

    A weight of 0 never wins while another is above it. A row of NaN gives 0.
    """
    tokens = weights.shape[1]
    sums = block_sums(weights)
    blocks = sums.shape[1]
    times = exponentials(seeds, blocks + SAMPLING_BLOCK)
    first = (sums / times[:, :blocks]).argmax(-1, keepdim=True) * SAMPLING_BLOCK
    members = first + torch.arange(SAMPLING_BLOCK, device=weights.device)
    inside = weights.gather(1, members.clamp(max=tokens - 1)) * (members < tokens)
    return (first + (inside / times[:, blocks:]).argmax(-1, keepdim=True)).squeeze(1)


def _mix(x: Integers) -> Integers:
    """Every bit of the result depends on every bit of `x`; one to one."""
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def _shift(x: Integers, bits: int) -> Integers:
    """To the right, with zeros: int64 by itself would copy its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
