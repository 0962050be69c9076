"""Filters: from logits to the weights that a token is drawn with: temperature, min-p, top-k, top-p.

Each filter is a threshold, so no order of tokens is needed, and tokens as likely as the last one that is kept
are kept with it, whichever they are.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.worker.chunks import pick
from weft.worker.random import block_sums
from weft.worker.staging import sent

# Columns of a row's settings, in float64.
TEMPERATURE, LOG_MIN_P, TOP_K, TOP_P = range(4)
NEUTRAL = (1.0, -np.inf, 0.0, 1.0)

NUCLEUS = 64  # tokens; most answers' top-p fits, and finding them takes a quarter of a sort


def weigh(logits: torch.Tensor, settings: np.ndarray) -> torch.Tensor:
    """Weights in proportion to the tokens' probabilities, 0 for those filtered out.

    `logits` are [R, V] float32 and stay as they are; `settings` are [R, 4], temperatures above 0, a top-k of
    0 or at least V keeping all tokens. Top-p is of the mass that min-p and top-k leave. [R, V] float32 out.
    """
    vocab, device = logits.shape[1], logits.device
    columns = sent(settings, device)
    temperature = columns[:, TEMPERATURE, None].float()
    best = logits.amax(-1, keepdim=True)
    # Not `exp`: on a CPU it takes twenty times as long where results are denormal, as low temperatures make them.
    weights = (logits - best).div_(temperature).softmax(-1)

    floor = torch.full_like(best, -torch.inf)
    least_likely = bool((settings[:, LOG_MIN_P] > -np.inf).any())
    if least_likely:
        floor = best + temperature * columns[:, LOG_MIN_P, None].float()
    few = np.flatnonzero((settings[:, TOP_K] > 0) & (settings[:, TOP_K] < vocab))
    if few.size:
        at = sent(few, device)
        values = pick(logits, few).topk(int(settings[few, TOP_K].max())).values
        last = values.gather(1, columns[at, TOP_K, None].long() - 1)
        floor[at] = torch.maximum(floor[at], last)
    if few.size or least_likely:
        weights.mul_(logits >= floor)

    nucleus = np.flatnonzero(settings[:, TOP_P] < 1)
    if nucleus.size:
        at = sent(nucleus, device)
        least = torch.zeros_like(best)
        least[at] = _last_in_nucleus(pick(weights, nucleus), columns[at, TOP_P, None])
        weights.mul_(weights >= least)
    return weights


def _last_in_nucleus(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The least weight that is needed to reach `share` [R, 1] of the sum, the greatest first: [R, V] in, [R, 1] out."""
    goal = block_sums(weights).sum(-1, keepdim=True, dtype=torch.float64) * share
    if weights.device.type != "cpu":
        # To ask which rows need more than a few would wait for the device, which costs more than to sort them all.
        return _reach(weights.sort(-1, descending=True).values, goal)[0]
    last, reached = _reach(weights.topk(min(NUCLEUS, weights.shape[1])).values, goal)
    rest = (~reached).squeeze(1).nonzero().squeeze(1)
    if len(rest):
        # numpy sorts ten times as fast as torch on a CPU.
        last[rest] = _reach(torch.from_numpy(np.sort(weights[rest].numpy())).flip(-1), goal[rest])[0]
    return last


def _reach(values: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row's `values`, greatest first: the one with which their sum reaches `goal`, and whether it does."""
    before = torch.searchsorted(values.cumsum(-1, dtype=torch.float64), goal)
    most = values.shape[1]
    return values.gather(1, before.clamp(max=most - 1)), before < most
