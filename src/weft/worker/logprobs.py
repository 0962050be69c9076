"""Logprobs: how likely the model itself found a token, and which ones it found likelier."""

from __future__ import annotations

from typing import Protocol

import torch

from weft.core.step import TokenLogprobs
from weft.kernels.base import Kernels
from weft.kernels.native import NativeKernels
from weft.worker.chunks import chunks


class Scorer(Protocol):
    """All find the same, but for rounding."""

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        """Of each row's target: logprob, rank, then the ids of the `top` likeliest tokens, best first, and their
        logprobs.

        [R, V] of any float type, which stay as they are, and [R] int64 in, [R, 2 + 2 * top] float64 out, so that ids
        and figures leave the device together; `top` is at most V. Ranks count the tokens that are strictly likelier;
        among equally likely ones the lower id comes first, as in argmax. A NaN makes all logprobs of its row NaN, and
        what else is said of that row means nothing.
        """
        ...


def scorer(kernels: Kernels) -> Scorer:
    """The one that goes with a model's kernels."""
    return kernels.score if isinstance(kernels, NativeKernels) else score


def score(logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
    """A `Scorer` for any device."""
    return torch.cat([_score(logits[rows].float(), targets[rows], top) for rows in chunks(len(targets), logits)])


def unpack(row: list[float], top: int) -> TokenLogprobs:
    """One row of a scorer's figures in words, with its first `top` alternatives."""
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
    """Ids of the greatest logits, best first, the lower id first among equals: [R, V] in, [R, count] out.

    `topk` alone breaks ties as it likes, and bf16 logits are full of them: the first id here is argmax's.
    """
    last = logits.shape[1] - 1
    # The bits of a float, read as an integer, are in its order once those of negatives are turned round; below
    # them goes the id. Adding 0 makes -0 and 0 the same.
    bits = (logits + 0.0).view(torch.int32)
    turn = (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.bitwise_xor_(turn).long().mul_(2**32)
    keys += torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)
