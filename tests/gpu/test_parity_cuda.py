"""The same numbers on a GPU: every architecture and layout, ranks sharing one card where there are fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import checkpoints, published, test_published
from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from tests.cpu.test_parity import NEW, PROMPTS, greedy
from weft import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")


def on_gpus(layout: str) -> dict[str, Any]:
    """The layout's arguments with its ranks dealt out to the GPUs there are."""
    config = LAYOUTS[layout]
    tensor = len(config.get("tensor_split", ())) or config.get("tensor_parallel_size", 1)
    stages = len(config.get("pipeline_split", ())) or config.get("pipeline_parallel_size", 1)
    ids = tuple(rank % torch.cuda.device_count() for rank in range(tensor * stages))
    # Ranks that share a card must share its memory as well.
    return {**config, "device": "cuda", "device_ids": ids, "kv_cache_memory_bytes": 64_000_000}


@pytest.fixture(scope="module", params=checkpoints.RECIPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.08), ("float16", 0.02)])
def test_logits_agree(checkpoint: Path, layout: str, dtype: str, tolerance: float) -> None:
    prompt = PROMPTS[1]
    model = checkpoints.reference(checkpoint, getattr(torch, dtype)).cuda()
    with torch.inference_mode():
        want = model(torch.tensor([prompt], device="cuda")).logits[0].float()
    got = logits_of(plan_for(checkpoint, layout, dtype=dtype, **on_gpus(layout)), prompt)
    assert (got - want).abs().mean() <= tolerance * want.std()


@pytest.mark.parametrize("layout", ["whole", "tp2"])
@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-int8"])
def test_logits_of_published_weights_agree(tmp_path: Path, name: str, layout: str) -> None:
    recipe = published.RECIPES[name]
    want = test_published.reference(test_published.written(tmp_path, recipe))
    plan = plan_for(tmp_path, layout, **on_gpus(layout))
    assert plan.quantization == recipe.method and plan.dtype == str(recipe.scales).removeprefix("torch.")
    got = logits_of(plan, test_published.PROMPT).cpu()
    assert (got - want).abs().mean() <= 0.08 * want.std()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_equal(checkpoint: Path, layout: str) -> None:
    assert ours(checkpoint, layout, "inline") == theirs(checkpoint)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_equal_across_processes(tmp_path: Path, layout: str) -> None:
    path = checkpoints.make("qwen3", tmp_path)
    assert ours(path, layout, "processes") == theirs(path)


def ours(path: Path, layout: str, executor: str) -> list[list[int]]:
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor=executor, **on_gpus(layout)) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    return [o.outputs[0].token_ids for o in outputs]


def theirs(path: Path) -> list[list[int]]:
    model = checkpoints.reference(path)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """The driver's count after a full step stays under gpu_memory_utilization of the GPU's memory."""
    path = checkpoints.make("qwen3", tmp_path)
    with LLM(str(path), device="cuda", skip_tokenizer_init=True, executor="inline", gpu_memory_utilization=0.5) as llm:
        llm.generate([[5] * 100] * 64, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        free, total = torch.cuda.mem_get_info()
        assert total - free <= 0.5 * total + 256 * 2**20
