"""Logprobs of tokens under the model's own distribution, and the likeliest alternatives."""

from __future__ import annotations

from typing import Protocol

import torch

from weft.core.step import TokenLogprobs
from weft.kernels.base import Kernels
from weft.kernels.native import NativeKernels
from weft.worker.chunks import row_chunks


class Scorer(Protocol):
    """Computes logprobs. All implementations agree up to rounding."""

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        """Score each row's target: [R, 2 + 2 * top] float64, so that ids and logprobs leave the device together.

        A row of the result holds the target's logprob and rank, then the ids of the `top` likeliest tokens, best first,
        then their logprobs. `logits` [R, V] of any float type are not changed; `targets` are [R] int64; `top` is at
        most V. The rank is 1 plus the number of tokens that are strictly likelier. Among equally likely tokens the
        lower id comes first, as in argmax. A NaN makes all logprobs of its row NaN, and the row's ids mean nothing.
        """
        ...


def scorer_for(kernels: Kernels) -> Scorer:
    """Scorer that goes with a model's kernels."""
    return kernels.score if isinstance(kernels, NativeKernels) else score


def score(logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
    """Compute logprobs in plain torch, on any device: a `Scorer`."""
    return torch.cat([_score(logits[rows].float(), targets[rows], top) for rows in row_chunks(len(targets), logits)])


def unpack_logprobs(row: list[float], top: int) -> TokenLogprobs:
    """Convert one row of a scorer's result, with its first `top` alternatives."""
    width = len(row) // 2 - 1
    ids, logprobs = row[2 : 2 + top], row[2 + width : 2 + width + top]
    return TokenLogprobs(row[0], int(row[1]), [int(token) for token in ids], logprobs)


def _score(logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
    total = logits.logsumexp(-1, keepdim=True)
    target = logits.gather(1, targets[:, None])
    parts = [target - total, (logits > target).sum(-1, keepdim=True) + 1]
    if top:
        ids = _likeliest(logits, top)
        parts += [ids, logits.gather(1, ids) - total]
    return torch.cat([part.double() for part in parts], 1)


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the greatest logits, best first, the lower id first among equals: [R, V] -> [R, count].

    `topk` alone breaks ties in any order, and bf16 logits are full of them: the first id here is argmax's.
    """
    last = logits.shape[1] - 1
    # The bits of a float, read as an integer, sort like the float once those of negatives are inverted; the id fills
    # the bits below. Adding 0 makes -0 and 0 the same.
    bits = (logits + 0.0).view(torch.int32)
    turn = (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.bitwise_xor_(turn).long().mul_(2**32)
    keys += torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)
