"""Tokens drawn and scored in plain torch, on any device."""

from __future__ import annotations

import numpy as np
import torch

from weft.machine.native.structures import MASK_BITS
from weft.ranks.kernels.plain.filters import weigh
from weft.ranks.kernels.random import race, seeds
from weft.ranks.kernels.rows import copy_to_device, pick_rows, row_chunks
from weft.ranks.kernels.sampling import TEMPERATURE, HostTokenSampler, SampledRows
from weft.ranks.kernels.streams import NOT_FINITE


class PlainSampling:
    """The implementation of `Sampling` in plain torch."""

    def create_token_sampler(self, slots: int) -> PlainTokenSampler:
        return PlainTokenSampler(slots)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        return score(logits, targets, top)

    def apply_masks(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        bits = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
        for chunk in row_chunks(len(rows), logits):
            forbidden = (masks[chunk].unsqueeze(-1) >> bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
            masked = logits.index_select(0, rows[chunk]).masked_fill_(forbidden, -torch.inf)
            logits.index_copy_(0, rows[chunk], masked)


class PlainTokenSampler(HostTokenSampler):
    """Token sampler in plain torch, for any device."""

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampledRows[np.ndarray], tensors: SampledRows[torch.Tensor]
    ) -> torch.Tensor:
        logits = logits.float()
        slots, positions = arrays.slots, arrays.positions
        columns = self._settings.columns[slots]
        drawn = np.flatnonzero(columns[:, TEMPERATURE])  # rows that are not greedy
        best, tokens = logits.max(-1)  # the first of equals, and NaN before all
        if drawn.size:
            columns = columns[drawn]
            streams = copy_to_device(seeds(self._settings.keys[slots[drawn]], positions[drawn]), logits.device)
            chunks = row_chunks(len(drawn), logits)
            drawn_tokens = torch.cat(
                [race(weigh(pick_rows(logits, drawn[at]), columns[at]), streams[at]) for at in chunks]
            )
            if len(drawn) == len(slots):
                tokens = drawn_tokens
            else:
                tokens = tokens.index_copy(0, copy_to_device(drawn, logits.device), drawn_tokens)
        return tokens.where(best.isfinite(), NOT_FINITE)


def score(logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
    """`Sampling.score` in plain torch, on any device."""
    return torch.cat([_score(logits[rows].float(), targets[rows], top) for rows in row_chunks(len(targets), logits)])


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
    # The bits of a float, read as an integer, sort like the float once the bits of negatives are inverted; the id fills
    # the bits below. Adding 0 makes -0 and 0 the same.
    bits = (logits + 0.0).view(torch.int32)
    turn = (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.bitwise_xor_(turn).long().mul_(2**32)
    keys += torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)
