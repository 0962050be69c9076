"""Numbers against the truth: every architecture in every layout gives Transformers' logits and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from tests.cpu import checkpoints
from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.families.llama import LLAMA
from weft.checkpoint.architectures.registry import ARCHITECTURES
from weft.engine.core import kv

pytestmark = pytest.mark.usefixtures("small_caches")

PROMPTS = [[1, 5, 9, 33, 7], list(range(3, 60)), [1, 150], [40, 41, 42] * 9]
NEW = 12
# Recipes of long tests: test_learnt_positions and test_deepseek have some layouts of them.
SELDOM = ("opt-post-norm", "deepseek-v2-lite")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


# Each of these is tested with every value: plain, windows with sinks and experts, latents. Others differ from one of
# them in what a rank computes, and not in how requests are put together: they have one value, and of the layouts that
# compute logits three, other ones from recipe to recipe.
EVERY = ("llama", "gpt-oss", "deepseek-v3")
FEW = 1


def with_recipes(name: str, values: Iterable[Any], few: int = FEW) -> pytest.MarkDecorator:
    """Parametrise a test with all recipes and each of the values; what others show is marked `long`."""
    values = list(values)
    rows = []
    for number, recipe in enumerate(checkpoints.RECIPES):
        for place, value in enumerate(values):
            often = recipe in EVERY or (place - few * number) % len(values) < few
            marks = () if often and recipe not in SELDOM else pytest.mark.long
            rows.append(pytest.param(recipe, value, marks=marks, id=f"{recipe}-{value}"))
    return pytest.mark.parametrize(("checkpoint", name), rows, indirect=["checkpoint"])


@pytest.fixture(scope="module")
def written(folder: Path) -> Callable[[str], Path]:
    """Function of a recipe: its checkpoint, written once."""
    return cache(lambda recipe: checkpoints.make(recipe, folder))


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, written: Callable[[str], Path]) -> Path:
    return written(request.param)


@cache
def true_tokens(checkpoint: Path) -> list[list[int]]:
    """Greedy continuations of PROMPTS by Transformers, never ending early."""
    model = checkpoints.reference(checkpoint)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


@cache
def true_logits(checkpoint: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of the second prompt by Transformers."""
    return reference_logits(checkpoint, dtype, PROMPTS[1])


def reference_logits(checkpoint: Path, dtype: torch.dtype, prompt: list[int]) -> torch.Tensor:
    """Transformers' logits [len(prompt), vocab] float32, computed in `dtype`."""
    with torch.inference_mode():
        logits: torch.Tensor = checkpoints.reference(checkpoint, dtype)(torch.tensor([prompt])).logits[0]
    return logits.float()


def greedy(model: torch.nn.Module, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@with_recipes("layout", LAYOUTS, few=3)
def test_logits_agree_in_every_layout(checkpoint: Path, layout: str) -> None:
    exact = true_logits(checkpoint, torch.float32)
    got = logits_of(plan_for(checkpoint, layout, dtype="float32"), PROMPTS[1])
    assert (got - exact).abs().max() <= 1e-4 * exact.std()


@with_recipes("layout", LAYOUTS)
def test_logits_in_bfloat16_are_as_close_as_those_of_transformers(checkpoint: Path, layout: str) -> None:
    """Layers multiply what a rounding changes. Where it changes the choice of an expert, one position differs by far
    more than the others."""
    exact, rounded = (true_logits(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = (logits_of(plan_for(checkpoint, layout, dtype="bfloat16"), PROMPTS[1]) - exact).abs()
    theirs = (rounded - exact).abs()
    assert ours.mean() <= 2 * theirs.mean() and ours.median() <= 1.5 * theirs.median()


@with_recipes("layout", LAYOUTS)
def test_greedy_tokens_equal_in_every_layout(checkpoint: Path, layout: str) -> None:
    with LLM(str(checkpoint), dtype="float32", skip_tokenizer_init=True, executor="inline", **LAYOUTS[layout]) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == true_tokens(checkpoint)


@with_recipes(
    "how",
    [
        {"max_num_batched_tokens": 7},  # chunked prefill, mixed with decode
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},  # alone
        {"kv_cache_memory_bytes": 1},  # replaced below by a cache so small that requests are preempted
        {"attention_backend": "torch"},
        {"block_size": 4, "enable_prefix_caching": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "tensor_parallel_size": 2, "max_num_batched_tokens": 20},
    ],
)
def test_tokens_do_not_depend_on_scheduling(checkpoint: Path, how: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = how.get("kv_cache_memory_bytes") == 1
    if preempt:
        monkeypatch.setattr(kv, "GROWTH", 1)  # or nobody would be let in who has to go again
        plan = plan_for(checkpoint, "whole", dtype="float32", block_size=2)
        # Of 2 tokens each, one more than the longest alone needs: three prompts fit together but not their answers.
        blocks = plan.kv_layout.blocks(70) + len(plan.kv_layout.groups)
        how = {"kv_cache_memory_bytes": blocks * plan.block_bytes(0), "max_model_len": 70, "block_size": 2}
    with LLM(str(checkpoint), dtype="float32", skip_tokenizer_init=True, executor="inline", **how) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        first = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS, params)  # now from the prefix cache, where there is one
        preemptions = llm.stats().preemptions
        windows = llm.plan.kv_layout.has_windows
    truth = true_tokens(checkpoint)
    assert [o.outputs[0].token_ids for o in first] == truth
    assert [o.outputs[0].token_ids for o in again] == truth
    # With windows the answers of three fit too.
    assert (preemptions > 0) == preempt or windows
    if how.get("enable_prefix_caching", True) and not preempt:
        assert again[1].num_cached_tokens >= 48
    assert first[0].num_cached_tokens == 0


class OwnConfig(transformers.LlamaConfig):
    """Configuration of an architecture that Transformers does not have."""

    model_type = "own"


class OwnForCausalLM(transformers.LlamaForCausalLM):
    """An architecture that Transformers does not have."""

    config_class = OwnConfig


def test_an_architecture_that_transformers_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(LLAMA, name="OwnForCausalLM", config=replace(LLAMA.config, model_type="own"), gguf="")
    monkeypatch.setitem(ARCHITECTURES, own.name, own)
    monkeypatch.setitem(checkpoints.RECIPES, "own", checkpoints.Recipe("Own", classes=(OwnConfig, OwnForCausalLM)))
    path = checkpoints.make("own", folder)
    assert isinstance(checkpoints.reference(path), OwnForCausalLM)
    exact = reference_logits(path, torch.float32, PROMPTS[1])
    got = logits_of(plan_for(path, "tp2", dtype="float32"), PROMPTS[1])
    assert (got - exact).abs().max() <= 1e-4 * exact.std()


def test_dynamic_rope_beyond_its_length_is_that_of_the_longest_text(folder: Path) -> None:
    """One base for all of the cache: that of max_model_len, at which Transformers agrees."""
    path = checkpoints.make("llama-dynamic", folder / "long")
    prompt = [3 + i % 150 for i in range(200)]
    with torch.inference_mode():
        want = checkpoints.reference(path)(torch.tensor([prompt])).logits[0]
    got = logits_of(plan_for(path, "whole", dtype="float32", max_model_len=200), prompt)
    assert (got - want).abs().max() <= 1e-3 * want.std()
