"""Tokens drawn and scored in plain torch, on any device.

The logits become weights by temperature, min-p, top-k and top-p. Each of these filters is a threshold: no token is
sorted, and tokens as likely as the last one that is kept are all kept with it.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.machine.native.structures import MASK_BITS
from weft.ranks.kernels.random import block_sums, race, seeds
from weft.ranks.kernels.rows import copy_to_device, pick_rows, row_chunks
from weft.ranks.kernels.sampling import LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P, HostTokenSampler, SampledRows
from weft.ranks.kernels.streams import NOT_FINITE

NUCLEUS = 64  # tokens; the top-p of most answers needs no more, and finding them takes a quarter of a sort


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


def weigh(logits: torch.Tensor, settings: np.ndarray) -> torch.Tensor:
    """Weights in proportion to the tokens' probabilities, 0 for those filtered out: [R, V] float32.

    `logits` [R, V] float32 are not changed; `settings` are R rows of `SlotSettings.columns`, with temperatures above 0.
    A top-k of 0 or of V and more keeps all tokens. Top-p is a share of the mass that min-p and top-k leave.
    """
    vocab, device = logits.shape[1], logits.device
    columns = copy_to_device(settings, device)
    temperature = columns[:, TEMPERATURE, None].float()
    best = logits.amax(-1, keepdim=True)
    # Not `exp`: on a CPU it takes twenty times as long where results are denormal, as low temperatures make them.
    weights = (logits - best).div_(temperature).softmax(-1)

    floor = torch.full_like(best, -torch.inf)
    has_min_p = bool((settings[:, LOG_MIN_P] > -np.inf).any())
    if has_min_p:
        floor = best + temperature * columns[:, LOG_MIN_P, None].float()
    top_k_rows = np.flatnonzero((settings[:, TOP_K] > 0) & (settings[:, TOP_K] < vocab))
    if top_k_rows.size:
        at = copy_to_device(top_k_rows, device)
        values = pick_rows(logits, top_k_rows).topk(int(settings[top_k_rows, TOP_K].max())).values
        last = values.gather(1, columns[at, TOP_K, None].long() - 1)
        floor[at] = torch.maximum(floor[at], last)
    if top_k_rows.size or has_min_p:
        weights.mul_(logits >= floor)

    top_p_rows = np.flatnonzero(settings[:, TOP_P] < 1)
    if top_p_rows.size:
        at = copy_to_device(top_p_rows, device)
        least = torch.zeros_like(best)
        least[at] = _last_in_nucleus(pick_rows(weights, top_p_rows), columns[at, TOP_P, None])
        weights.mul_(weights >= least)
    return weights


def _last_in_nucleus(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The least weight needed to reach `share` [R, 1] of the sum, greatest weights first: [R, V] -> [R, 1]."""
    goal = block_sums(weights).sum(-1, keepdim=True, dtype=torch.float64) * share
    if weights.device.type != "cpu":
        # To find the rows that need more than a few would wait for the device, which costs more than to sort them all.
        return _reach(weights.sort(-1, descending=True).values, goal)[0]
    last, reached = _reach(weights.topk(min(NUCLEUS, weights.shape[1])).values, goal)
    unreached = (~reached).squeeze(1).nonzero().squeeze(1)
    if len(unreached):
        # numpy sorts ten times as fast as torch on a CPU.
        descending = torch.from_numpy(np.sort(weights[unreached].numpy())).flip(-1)
        last[unreached] = _reach(descending, goal[unreached])[0]
    return last


def _reach(values: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value with which the sum of each row's `values`, greatest first, reaches `goal`, and True where it does."""
    before = torch.searchsorted(values.cumsum(-1, dtype=torch.float64), goal)
    most = values.shape[1]
    return values.gather(1, before.clamp(max=most - 1)), before < most
