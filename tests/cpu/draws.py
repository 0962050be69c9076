"""Rows for the samplers, and how far what was drawn is from what should have been."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.cpu.kernels import native, triton_kernels
from weft.engine.core.params import SamplingParams
from weft.ranks.kernels.plain import PlainSampling
from weft.ranks.kernels.plain.sampling import weigh
from weft.ranks.kernels.random import block_sums, exponentials, seeds
from weft.ranks.kernels.sampling import Sampling, SlotSettings
from weft.ranks.kernels.streams import SAMPLING_BLOCK
from weft.ranks.worker.sample_arrays import SampleArrays
from weft.ranks.worker.sampler import sampling_settings

CPU = torch.device("cpu")
MASK = 2**64 - 1
TIE = 1e-5  # of a time: what rounding may turn round
PARAMS = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    SamplingParams(top_k=3),
    SamplingParams(min_p=0.05, top_k=1000),
    SamplingParams(top_k=1),
]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations above the mean, over the cells that a draw can reach."""
    reached = probabilities > 0
    assert not counts[~reached].any()
    hoped = probabilities[reached] * counts.sum()
    degrees = reached.sum() - 1
    return float((((counts[reached] - hoped) ** 2 / hoped).sum() - degrees) / math.sqrt(2 * degrees))


def sampling_of(kind: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Sampling:
    """The sampling of a kind of kernels, for a model of this dtype."""
    if kind == "torch":
        return PlainSampling()
    return (native(dtype) if kind == "native" else triton_kernels(device=device)).sampling


def chosen(
    logits: torch.Tensor,
    params: list[SamplingParams],
    positions: np.ndarray,
    device: torch.device = CPU,
    kind: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that a token sampler draws for rows with these parameters, in turn, and those of torch on a CPU."""
    rows = len(logits)
    slots, found = np.arange(rows)[::-1].copy(), []
    for sampling, there in ((sampling_of(kind, logits.dtype, device), device), (PlainSampling(), CPU)):
        token_sampler = sampling.create_token_sampler(rows)
        for row, slot in enumerate(slots):
            token_sampler.admit(int(slot), sampling_settings(params[row % len(params)]), key_of(row))
        arrays = SampleArrays(np.arange(rows), slots, positions, settings=token_sampler.take_settings_update())
        tensors = arrays.with_tensors(torch.from_numpy(array).to(there) for array in arrays.flatten())
        found.append(token_sampler.sample_tokens(logits.to(there), arrays, tensors).cpu())
    return found[0], found[1]


def key_of(row: int) -> int:
    return row * 0x9E3779B97F4A7C15 & MASK


def far_apart(
    got: torch.Tensor, want: torch.Tensor, logits: torch.Tensor, params: list[SamplingParams], positions: np.ndarray
) -> list[int]:
    """Rows whose tokens differ, though not by the rounding of two times that are almost the same."""
    rows = []
    for row in (got != want).nonzero().flatten().tolist():
        settings = SlotSettings(1)
        settings.admit(0, sampling_settings(params[row % len(params)]), key_of(row))
        weights = weigh(logits[row : row + 1].float(), settings.columns)
        sums = block_sums(weights)[0].double()
        times = exponentials(
            torch.from_numpy(seeds(settings.keys, positions[row : row + 1])), len(sums) + SAMPLING_BLOCK
        )[0]
        block, place = divmod(int(got[row]), SAMPLING_BLOCK)
        inside = weights[0, block * SAMPLING_BLOCK : (block + 1) * SAMPLING_BLOCK].double()
        races = (sums / times[: len(sums)], block), (inside / times[len(sums) : len(sums) + len(inside)], place)
        if any(scores[winner] < scores.max() * (1 - TIE) for scores, winner in races):
            rows.append(row)
    return rows
