"""Sampling: the Triton kernels beside torch, in microseconds of a step whose settings are known, launches included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from scripts.programs.gpu_check.work import Figure, Options
from weft import SamplingParams
from weft.ranks.kernels.plain import PlainSampling
from weft.ranks.kernels.sampling import TokenSampler
from weft.ranks.kernels.triton.kernels import TritonSampling
from weft.ranks.worker.sample_arrays import SampleArrays
from weft.ranks.worker.sampler import sampling_settings

VOCAB = 151_936  # Qwen3's
CALLS = 20
CUDA = torch.device("cuda", 0)
ASKED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.6),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 50, top-p 0.9, min-p 0.01": SamplingParams(top_k=50, top_p=0.9, min_p=0.01),
}
# A trained model's logits have few that matter; those of random weights are the hardest for top-p.
SPREADS = {"steep": 4.0, "flat": 0.3}


def sampling(options: Options) -> Iterator[Figure]:
    """The roofline reads the logits once, in 16 bits."""
    vocab, batches, calls = (64, (2,), 1) if options["rehearse"] else (VOCAB, (1, 32, 256), CALLS)
    for rows in batches:
        bound = round(1e6 * rows * vocab * 2 / options["copy_Bps"], 2)
        for kind, spread in SPREADS.items():
            logits = (torch.randn(rows, vocab, device=CUDA) * spread).bfloat16()
            for name, params in ASKED.items():
                ours, torchs = (
                    microseconds(step(each.create_token_sampler(rows), logits, params), calls)
                    for each in (TritonSampling(CUDA), PlainSampling())
                )
                row = f"{rows} row{'s' * (rows > 1)}, {kind} logits, {name}"
                yield Figure(row, round(ours, 1), "us", bound, note=f"torch {torchs:,.0f} us")


@torch.inference_mode()
def microseconds(call: Callable[[], object], calls: int) -> float:
    """Microseconds of one of several calls, each issued while the one before may run."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls * 1e6


@torch.inference_mode()
def step(token_sampler: TokenSampler, logits: torch.Tensor, params: SamplingParams) -> Callable[[], object]:
    """A choice for rows of these parameters, whose settings are no news."""
    slots, positions = np.arange(len(logits)), np.full(len(logits), 7)
    for slot in slots:
        token_sampler.admit(int(slot), sampling_settings(params), int(slot))

    def prepared() -> Callable[[], object]:
        arrays = SampleArrays(slots, slots, positions, settings=token_sampler.take_settings_update())
        tensors = arrays.with_tensors(torch.from_numpy(array).to(CUDA) for array in arrays.flatten())
        return partial(token_sampler.sample_tokens, logits, arrays, tensors)

    prepared()()  # brings the settings
    call = prepared()
    call()
    return call
