"""Every mixture of experts in every layout: Transformers' tokens, however requests are scheduled.

Ranks are threads that exchange through shared memory, so that their layers are fused as those of processes are.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.cpu import checkpoints, deepseek
from tests.cpu.layouts import plan_for
from tests.cpu.test_mxfp4 import publish_mxfp4
from tests.cpu.test_parity import greedy
from weft import LLM, SamplingParams
from weft.engine.core import kv
from weft.ranks.layers.exchange import DispatchExchange, GatherExchange

pytestmark = pytest.mark.usefixtures("small_caches")

EXPERTS = {"enable_expert_parallel": True}
# The third begins as the second does.
PROMPTS = [[7], list(range(3, 60)), [*range(3, 50), 9, 8], [1, 150, 30], [40, 41, 42] * 9]
NEW = 10
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"tensor_parallel_size": 2},
    "dp2 x ep2": {"data_parallel_size": 2},
    "dp2 x tp2 x ep4": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "dp2 x moe-tp2": {"data_parallel_size": 2, "expert_parallel_size": 1},
    "pp2 x ep2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "dp2 x tp 2:1": {"data_parallel_size": 2, "tensor_split": (2, 1)},
}
HOWS: dict[str, dict[str, Any]] = {
    "one-shot": {},
    "chunked": {"max_num_batched_tokens": 7},
    "alone": {"max_num_seqs": 1},
    "preempted": {"max_model_len": 70, "block_size": 2},
    "ahead": {"async_scheduling": True, "max_num_batched_tokens": 20},
    "uncached": {"enable_prefix_caching": False, "block_size": 4},
}


class Model(NamedTuple):
    """A recipe, how it is quantised, and what else differs from the recipe: `fields` of config.json as its publisher
    writes them, which Transformers' classes do not read."""

    recipe: str
    quantization: str | None = None
    mxfp4: bool = False
    fields: dict[str, Any] | None = None


MODELS = {
    "mixtral": Model("mixtral-window"),
    "qwen2-moe": Model("qwen2-moe"),
    "qwen3-moe": Model("qwen3-moe-biased"),
    "gpt-oss": Model("gpt-oss"),
    "gpt-oss in MXFP4": Model("gpt-oss-mxfp4", mxfp4=True),
    "deepseek-v2": Model("deepseek-v2"),
    "deepseek-v3": Model("deepseek-v3"),
    "qwen2-moe in 8 bits": Model("qwen2-moe-normalised", quantization="int8"),
    "deepseek-v2-lite": Model("deepseek-v2-lite"),
    "kimi-k2": Model("deepseek-v3", fields=deepseek.KIMI),
}
# A way of scheduling for each model and layout, so that each meets every other. There are more models than ways: the
# first and two of the last would have the same pairs of both, of which each has half. The last two differ from those
# before them in what a rank computes for itself: they have one layout, and the others in long tests.
ONCE = {"deepseek-v2-lite": "dp2 x moe-tp2", "kimi-k2": "dp2 x tp2 x ep4"}
NUMBERED = product(enumerate(MODELS), enumerate(LAYOUTS))


def seldom(model: str, m: int, layout: str, n: int) -> bool:
    """Return True if the case of the m-th model and the n-th layout is a long test."""
    if model in ONCE:
        return layout != ONCE[model]
    return n % 2 == 0 if m < 2 else m >= len(HOWS) and n % 2 == 1


CASES = [
    pytest.param(
        model,
        layout,
        [*HOWS][(m + n) % len(HOWS)],
        marks=[pytest.mark.long] * seldom(model, m, layout, n),
    )
    for (m, model), (n, layout) in NUMBERED
]


class Truth(NamedTuple):
    path: Path
    options: dict[str, Any]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    """The models so far, with the right answers to PROMPTS."""
    return {}


@pytest.fixture
def truth(request: pytest.FixtureRequest, truths: dict[str, Truth], tmp_path_factory: pytest.TempPathFactory) -> Truth:
    name = request.param
    if name not in truths:
        truths[name] = find_truth(MODELS[name], tmp_path_factory.mktemp("mixture"))
    return truths[name]


def find_truth(model: Model, folder: Path) -> Truth:
    """The answers of Transformers; of one rank if the weights are rounded."""
    path = checkpoints.make(model.recipe, folder)
    if model.mxfp4:
        path, exact = publish_mxfp4(path)
        return Truth(path, {}, transformers_answers(exact))
    if model.fields is not None:
        deepseek.edit_config(path, **model.fields)
        reference = deepseek.Reference(path)
        return Truth(path, {}, [reference.greedy(prompt, NEW) for prompt in PROMPTS])
    if model.quantization is None:
        return Truth(path, {}, transformers_answers(path))
    options = {"quantization": model.quantization}
    with start(path, **options) as llm:
        return Truth(path, options, answers(llm))


def transformers_answers(path: Path) -> list[list[int]]:
    model = checkpoints.reference(path)
    return [greedy(model, prompt, NEW) for prompt in PROMPTS]


def start(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"executor": "inline", "dtype": "float32", "skip_tokenizer_init": True, **options})


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(("truth", "layout", "how"), CASES, indirect=["truth"])
def test_every_mixture_in_every_layout(
    truth: Truth, layout: str, how: str, shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, again from the prefix cache, and one at a time, beside groups that then have nothing."""
    options = {**EXPERTS, **truth.options, **LAYOUTS[layout], **HOWS[how]}
    for exchange in (GatherExchange, DispatchExchange):
        monkeypatch.setattr(exchange, "dispatch", None)  # C++ exchanges
    if how == "preempted":
        options |= little_cache(truth.path, options)
        monkeypatch.setattr(kv, "GROWTH", 1)  # or nobody would be let in who has to go again
    with start(truth.path, **options) as llm:
        assert [answers(llm) for _ in range(2)] == [truth.answers] * 2
        (alone,) = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
        stats, rows, plan = llm.stats(), llm.layout(), llm.plan
    assert alone.outputs[0].token_ids == truth.answers[0]
    # With windows all answers fit.
    assert how != "preempted" or stats.preemptions or plan.kv_layout.has_windows
    experts = plan.shape.experts
    # Each expert is on one rank, or a part of each is on both.
    assert experts and dealt(rows, stage=0) == [*range(experts.count)] * (2 if layout == "dp2 x moe-tp2" else 1)


def little_cache(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Options for a KV cache of the longest text and a block."""
    plan = plan_for(path, "whole", dtype="float32", **options)
    blocks = plan.kv_layout.blocks(70) + len(plan.kv_layout.groups)
    return {"kv_cache_memory_bytes": blocks * max(map(plan.block_bytes, range(len(plan.places))))}


def dealt(rows: list[dict[str, Any]], stage: int) -> list[int]:
    """The experts of all ranks of a stage."""
    ranks = [row for row in rows if row["stage"] == stage]
    return [number for row in ranks for number in range(row["first_expert"], row["first_expert"] + row["experts"])]


@pytest.mark.parametrize("layout", ["dp2 x ep2", "dp2 x tp2 x ep4"])
@pytest.mark.parametrize("truth", ["qwen2-moe", "gpt-oss"], indirect=True)
def test_the_exchange_in_python_is_the_reference(truth: Truth, layout: str) -> None:
    with start(truth.path, **EXPERTS, **truth.options, **LAYOUTS[layout]) as llm:
        assert answers(llm) == truth.answers


@pytest.mark.parametrize("layout", ["dp2 x tp2 x ep4", "dp2 x tp 2:1"])
@pytest.mark.parametrize("truth", ["qwen2-moe"], indirect=True)
def test_a_static_exchange_gives_the_same_tokens(truth: Truth, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets all tokens, as in CUDA graphs; the ranks of a group bring uneven shares of them."""
    monkeypatch.setattr(DispatchExchange, "as_in_graphs", True)
    monkeypatch.setattr(DispatchExchange, "_dispatch_chosen", None)
    with start(truth.path, **EXPERTS, **truth.options, **LAYOUTS[layout]) as llm:
        assert answers(llm) == truth.answers


@pytest.mark.parametrize("layout", ["dp2 x ep2", "dp2 x tp2 x ep4"])
@pytest.mark.parametrize("truth", ["qwen2-moe", "gpt-oss"], indirect=True)
def test_ranks_of_several_threads(
    truth: Truth, layout: str, shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with start(truth.path, **EXPERTS, **truth.options, **LAYOUTS[layout]) as llm:
        assert [answers(llm) for _ in range(2)] == [truth.answers] * 2


@pytest.mark.parametrize("layout", ["dp2 x ep2", "dp2 x tp2 x ep4", "dp2 x moe-tp2"])
@pytest.mark.parametrize("truth", ["gpt-oss in MXFP4"], indirect=True)
def test_bfloat16_keeps_mxfp4(truth: Truth, layout: str, shared_memory: None) -> None:
    """Scores of a prompt as near the exact ones as one rank's."""
    prompt, params = PROMPTS[1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def scores(dtype: str, **options: Any) -> torch.Tensor:
        with start(truth.path, dtype=dtype, **options) as llm:
            # Beside another one, of the other group.
            output, _ = llm.generate([prompt, PROMPTS[2]], params, use_tqdm=False)
        found = output.prompt_logprobs
        assert found
        return torch.tensor([row[token].logprob for row, token in zip(found[1:], prompt[1:], strict=True) if row])

    exact, one = scores("float32"), scores("bfloat16")
    ours = scores("bfloat16", **EXPERTS, **LAYOUTS[layout])
    assert (ours - exact).abs().mean() <= 2 * (one - exact).abs().mean()


def test_ranks_fuse_layers_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: None) -> None:
    """C++ computes 32 columns of shared experts and not 16: a rank that fuses alone would wait for ever."""
    narrow = checkpoints.MIXTURE | {"shared_expert_intermediate_size": 48}
    monkeypatch.setitem(checkpoints.RECIPES, "narrow", checkpoints.Recipe("Qwen2Moe", narrow))
    path = checkpoints.make("narrow", tmp_path)
    with start(path, tensor_split=(2, 1)) as llm:
        assert [len(place.shared_ffn) for place in llm.plan.places] == [32, 16]
        assert answers(llm) == transformers_answers(path)
