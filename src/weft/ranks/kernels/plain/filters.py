"""Sampling filters: from logits to the weights that a token is drawn with, by temperature, min-p, top-k and top-p.

Each filter is a threshold, so tokens need not be sorted, and tokens as likely as the last one that is kept are all kept
with it.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.ranks.kernels.random import block_sums
from weft.ranks.kernels.rows import copy_to_device, pick_rows
from weft.ranks.kernels.sampling import LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P

NUCLEUS = 64  # tokens; the top-p of most answers needs no more, and finding them takes a quarter of a sort


def weigh(logits: torch.Tensor, settings: np.ndarray) -> torch.Tensor:
    """Weights in proportion to the tokens' probabilities, 0 for those filtered out: [R, V] float32.

    `logits` [R, V] float32 are not changed; `settings` [R, 4] float64 are rows of `SlotSettings.columns`, with
    temperatures above 0. A top-k of 0 or of V and more keeps all tokens. Top-p is a share of the mass that min-p and
    top-k leave.
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
