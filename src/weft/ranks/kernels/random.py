"""Random streams of requests, and the race that draws a token with them.

A stream is a function of (key, position) alone and has no state. So a token does not depend on what else is in the
batch, on the batch's order, or on how the model is cut.

To invert the cumulative distribution with one uniform number would break that. Rounding in the logits differs from
layout to layout and moves every border of the distribution a little; in its long flat tail a small move gives another
token. In a race, token i takes an exponential time with rate weight[i] and the first token wins: P(i) = weight[i] /
sum(weight), and rounding matters only if the first two are almost level. The race is run twice, over blocks of tokens
and within the block that won, so a row needs V / 256 + 256 random numbers instead of V.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from weft.ranks.kernels import streams
from weft.ranks.kernels.streams import SAMPLING_BLOCK

# Signed 64-bit integers, whose products wrap, in numpy arrays and in torch.
SPLITMIX_STEP, SPLITMIX_FIRST, SPLITMIX_SECOND = (
    number - 2**64 for number in (streams.SPLITMIX_STEP, streams.SPLITMIX_FIRST, streams.SPLITMIX_SECOND)
)

Integers = TypeVar("Integers", np.ndarray, torch.Tensor)


def seeds(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Seeds of the streams of (key, position): [R] uint64 and [R] int64 -> [R] int64."""
    return _mix(_mix(keys.view(np.int64)) + positions * np.int64(SPLITMIX_STEP))


def exponentials(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers of each stream, above 0, mean 1: [R] int64 -> [R, count] float64."""
    counter = torch.arange(1, count + 1, device=seeds.device) * SPLITMIX_STEP
    bits = _shift(_mix(seeds[:, None] + counter), 12)
    # The middle of a cell among 2**52 equal cells: neither 0 nor 1, so never an infinite time or none at all.
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums over SAMPLING_BLOCK tokens at a time: [R, V] -> [R, ceil(V / SAMPLING_BLOCK)].

    A row has the same sums in any batch."""
    tokens = weights.shape[1]
    blocks = tokens // SAMPLING_BLOCK
    whole = blocks * SAMPLING_BLOCK
    sums = weights[:, :whole].unflatten(1, (blocks, SAMPLING_BLOCK)).sum(-1)
    if whole < tokens:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return sums


def race(weights: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Draw one token per row with probability weight / sum of weights: [R, V] float32 and [R] int64 -> [R] int64.

    A weight of 0 never wins unless all are 0. A row of NaN gives 0.
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
    """Mix bits one to one, so that every bit of the result depends on every bit of `x`."""
    x = (x ^ _shift(x, 30)) * SPLITMIX_FIRST
    x = (x ^ _shift(x, 27)) * SPLITMIX_SECOND
    return x ^ _shift(x, 31)


def _shift(x: Integers, bits: int) -> Integers:
    """Shift to the right and fill with zeros: int64 by itself would copy its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
