"""The sampler's kernels as they are compiled for the card, against torch's; and steps that wait for nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.draws import PARAMS, chi_square, chosen, far_apart, sampling_of
from weft import LLM, SamplingParams
from weft.ranks.kernels.streams import NOT_FINITE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "spread"), [(2000, 700, 3.0), (300, 50_257, 0.3), (64, 151_936, 4.0), (1, 1, 1.0)]
)
def test_its_tokens_are_those_of_torch(rows: int, vocab: int, spread: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)
    positions = np.arange(rows) * 3 + 1
    got, want = chosen(logits, PARAMS, positions, CUDA)
    assert far_apart(got, want, logits, PARAMS, positions) == []
    assert (got != want).sum() <= 1 + rows // 500


def test_rows_that_are_no_distribution() -> None:
    logits = torch.randn(5, 70_000) * 3
    logits[1, 300] = math.nan
    logits[2] = -math.inf
    logits[3, [17, 400]] = math.inf
    logits[4] = math.nan
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.5, top_k=7, min_p=0.01),
        SamplingParams(temperature=0),
    ):
        got, torchs = chosen(logits, [params], np.arange(5), CUDA)
        assert got[1:].tolist() == [NOT_FINITE] * 4 and got[0] >= 0
        assert torch.equal(got, torchs)


def test_frequencies_are_those_of_the_distribution() -> None:
    weights = torch.rand(700, generator=torch.Generator().manual_seed(1)) ** 4
    weights[::5] = 0
    logits = weights.log().expand(30_000, -1).contiguous()
    counts = np.bincount(chosen(logits, [SamplingParams()], np.arange(30_000), CUDA)[0].numpy(), minlength=700)
    assert abs(chi_square(counts, (weights.double() / weights.double().sum()).numpy())) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 151_936, generator=torch.Generator().manual_seed(3)).to(dtype)
    masks = torch.randint(-(2**31), 2**31, (3, 151_936 // 32), generator=torch.Generator().manual_seed(4)).int()
    rows, on_card = torch.tensor([4, 0, 2]), logits.to(CUDA)
    sampling_of("triton", device=CUDA).apply_masks(on_card, rows.to(CUDA), masks.to(CUDA))
    sampling_of("torch").apply_masks(logits, rows, masks)
    assert torch.equal(on_card.cpu(), logits)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "gemma3", "deepseek-v3"])
def test_steps_wait_for_nothing_and_copy_from_pinned_memory_only(name: str, tmp_path: Path) -> None:
    path = checkpoints.make(name, tmp_path)
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, **wishes)
        for wishes in (
            {"temperature": 0.7},
            {"temperature": 0.0, "logprobs": 3},
            {"top_p": 0.9, "top_k": 20},
            {"repetition_penalty": 1.2, "logit_bias": {5: 2.0}, "min_tokens": 20},
        )
    ]
    common = {"skip_tokenizer_init": True, "executor": "inline", "kv_cache_memory_bytes": 64_000_000}
    # Prompts are read in chunks, beside rows that decode.
    common |= {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with LLM(str(path), attention_backend="triton", **common) as llm:
        prompts = [[3 + i, *[4, 5] * (1 + 14 * i)] for i in range(len(params))]
        llm.generate(prompts, params)
        settle(llm)
        taken = torch.cuda.memory_stats()["num_device_alloc"]
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            llm.generate(prompts, params)
        settle(llm)
        assert torch.cuda.memory_stats()["num_device_alloc"] == taken
    names = {event.name for event in profile.events()}
    assert any("Pinned -> Device" in name for name in names), sorted(names)
    assert not [name for name in names if "Pageable" in name or name == "cudaStreamSynchronize"]


def settle(llm: LLM) -> None:
    """Have all steps end, one that was scheduled ahead too: each frees its tensors when it ends."""
    llm.generate([[3]], SamplingParams(max_tokens=1))
    torch.cuda.synchronize()
