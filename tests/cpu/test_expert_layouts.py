"""Experts dealt out to ranks, and attention groups that share them: Transformers' tokens, whoever computes which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints
from tests.cpu.layouts import logits_of, plan_for
from tests.cpu.test_parity import NEW, PROMPTS, greedy
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.shape import Experts
from weft.checkpoint.checkpoint import resolve
from weft.engine.core import kv
from weft.engine.core.commands import RankStats
from weft.errors import ModelError

EXPERTS = {"enable_expert_parallel": True}
# Layouts of one attention group.
DEALT: dict[str, dict[str, Any]] = {
    "ep2": {"tensor_parallel_size": 2},
    "ep3": {"tensor_parallel_size": 3},
    "ep 2:1": {"tensor_split": (2, 1)},
    "tp3, one part": {"tensor_parallel_size": 3, "expert_parallel_size": 1},
    "tp4, two parts": {"tensor_parallel_size": 4, "expert_parallel_size": 2},
    "ep2 x pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ep 1:2 x pp 1,3,1": {"tensor_split": (1, 2), "pipeline_split": (1, 3, 1)},
}
Mixture = tuple[Path, list[list[int]]]  # a checkpoint, and the right answers
Edit = Callable[[dict[str, torch.Tensor]], None]


def to_experts(*chosen: int) -> Edit:
    """Have the routers choose these experts for every token: by a number that is large in all hidden states."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][:, 0] = 40.0
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                tensor[:, 0] = 0.0
                for number, expert in enumerate(chosen):
                    tensor[expert, 0] = 5.0 + number

    return edit


def routed_to(path: Path, prompt: list[int]) -> set[int]:
    """The experts that Transformers' routers choose for any token."""
    model, seen = checkpoints.reference(path), set[int]()
    top_k = model.config.num_experts_per_tok

    def note(gate: Any, given: tuple[torch.Tensor], _: Any) -> None:
        scores = given[0].flatten(0, -2) @ gate.weight.T
        seen.update(scores.topk(top_k).indices.flatten().tolist())

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(note)
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


def make_mixture(folder: Path, name: str, *, edit: Edit | None = None, **config: Any) -> Path:
    """A checkpoint of Qwen3-MoE, with experts in all layers but one."""
    recipe = checkpoints.Recipe(
        "Qwen3Moe", checkpoints.MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": [1]} | config
    )
    checkpoints.RECIPES[name] = recipe
    try:
        path = checkpoints.make(name, folder)
    finally:
        del checkpoints.RECIPES[name]
    if edit:
        file = path / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def with_answers(folder: Path, experts: int) -> Mixture:
    """A checkpoint with this number of experts, and Transformers' greedy answers to PROMPTS."""
    path = make_mixture(folder, f"experts-{experts}", num_experts=experts)
    model = checkpoints.reference(path)
    return path, [greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def seven(folder: Path) -> Mixture:
    return with_answers(folder, 7)


@pytest.fixture(scope="module", params=[5, 7])
def mixture(request: pytest.FixtureRequest, folder: Path) -> Mixture:
    return with_answers(folder, 5) if request.param == 5 else request.getfixturevalue("seven")


def start(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"executor": "inline", "dtype": "float32", "skip_tokenizer_init": True, **options})


def answers(path: Path, **options: Any) -> list[list[int]]:
    """Greedy answers to PROMPTS, by threads if `executor` does not say otherwise."""
    with start(path, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True), use_tqdm=False)
        # Once more, from the prefix cache.
        again = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True), use_tqdm=False)
    first, second = ([output.outputs[0].token_ids for output in these] for these in (outputs, again))
    assert first == second
    return first


@pytest.mark.each_value
@pytest.mark.parametrize("layout", DEALT)
def test_dealt_experts_give_the_same_tokens(mixture: Mixture, layout: str) -> None:
    path, truth = mixture
    assert answers(path, **EXPERTS, **DEALT[layout]) == truth


def test_dealt_experts_give_the_same_logits(mixture: Mixture) -> None:
    path, prompt = mixture[0], PROMPTS[1]
    with torch.inference_mode():
        exact = checkpoints.reference(path)(torch.tensor([prompt])).logits[0]
    for layout in ("ep2", "ep 2:1", "tp4, two parts"):
        got = logits_of(plan_for(path, "whole", dtype="float32", **EXPERTS, **DEALT[layout]), prompt)
        assert (got - exact).abs().max() <= 1e-4 * exact.std(), layout


@pytest.mark.parametrize("chosen", [(0, 1), (4, 5), (0, 5)], ids=str)
def test_all_tokens_choose_the_same_experts(folder: Path, chosen: tuple[int, ...], shared_memory: None) -> None:
    """One rank has both, the other none; or each has one."""
    path = make_mixture(folder, f"choose-{chosen[0]}-{chosen[1]}", edit=to_experts(*chosen))
    assert routed_to(path, PROMPTS[1]) == {*chosen}
    truth = [greedy(checkpoints.reference(path), prompt, NEW) for prompt in PROMPTS]
    for layout in ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 3}, {"data_parallel_size": 2}):
        assert answers(path, **EXPERTS, **layout) == truth


def test_one_expert_gets_every_token(folder: Path, shared_memory: None) -> None:
    path = make_mixture(folder, "choose-one", edit=to_experts(3), num_experts_per_tok=1)
    assert routed_to(path, PROMPTS[1]) == {3}
    truth = [greedy(checkpoints.reference(path), prompt, NEW) for prompt in PROMPTS]
    for layout in ("tensor_parallel_size", "data_parallel_size"):
        assert answers(path, **EXPERTS, **{layout: 2}) == truth


EXPERT = "model.layers.2.mlp.experts.4."


@pytest.mark.parametrize(
    ("name", "dims", "code", "values"),
    [
        ("down_proj.weight", None, "missing-tensor", [EXPERT + "down_proj.weight"]),
        ("gate_proj.weight", None, "missing-tensor", [EXPERT + "gate_proj.weight"]),
        ("up_proj.weight", (95, 48), "tensor-of-other-dims", [EXPERT + "up_proj.weight", [95, 48], [96, 48]]),
    ],
)
def test_an_expert_that_is_missing_or_misshapen(
    folder: Path, name: str, dims: tuple[int, int] | None, code: str, values: list[object]
) -> None:
    """One of those that a checkpoint has one by one."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[EXPERT + name]
        if dims:
            tensors[EXPERT + name] = torch.zeros(dims)

    path = make_mixture(folder, f"without-{name}", edit=edit)
    with refuses(ModelError, code, *values):
        resolve(str(path))


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "data_parallel_size"])
def test_ranks_report_the_tokens_of_each_expert(folder: Path, layout: str, shared_memory: None) -> None:
    path = make_mixture(folder, f"count-{layout}", edit=to_experts(3), num_experts_per_tok=1)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with start(path, **EXPERTS, **{layout: 2}) as llm:

        def counted() -> list[int]:
            """Tokens of all experts, in the order of ranks and so of numbers."""
            answered = llm._running.call_each(RankStats(reset=False))
            return [tokens for _, reports in answered for report in reports for tokens in report.routed_tokens]

        before = counted()
        llm.generate(PROMPTS[1], params, use_tqdm=False)
        grown = [now - then for then, now in zip(before, counted(), strict=True)]
        shape = llm.plan.shape
    experts, mixtures = shape.experts, sum(isinstance(layer.ffn, Experts) for layer in shape.layers)
    assert experts and len(grown) == experts.count
    # The last token of the answer goes through no layer.
    assert grown == [(len(PROMPTS[1]) + NEW - 1) * mixtures * (number == 3) for number in range(experts.count)]


def test_dealt_experts_in_processes(mixture: Mixture) -> None:
    path, truth = mixture
    assert answers(path, **EXPERTS, tensor_parallel_size=2, executor="processes") == truth


# Layouts of two attention groups, with the way of tokens to the experts: with as few parts as a token chooses, all
# groups gather all tokens.
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 x ep2": ("gather", {"data_parallel_size": 2}),
    "dp2 x moe-tp2": ("gather", {"data_parallel_size": 2, "expert_parallel_size": 1}),
    "dp2 x tp2 x ep4": ("dispatch", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    "dp2 x tp2, two parts": (
        "gather",
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2},
    ),
    "dp2 x tp 2:1": ("dispatch", {"data_parallel_size": 2, "tensor_split": (2, 1)}),
    "dp3 x ep3": ("dispatch", {"data_parallel_size": 3}),
    "dp2 x ep2 x pp2": ("gather", {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp3 x ep3 x pp 1,3,1": ("dispatch", {"data_parallel_size": 3, "pipeline_split": (1, 3, 1)}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("layout", GROUPS)
def test_attention_groups_give_the_same_tokens(mixture: Mixture, layout: str) -> None:
    path, truth = mixture
    exchange, options = GROUPS[layout]
    assert plan_for(path, "whole", **EXPERTS, **options).exchange == exchange
    assert answers(path, **EXPERTS, **options) == truth


SCHEDULING: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 7},  # prompts in chunks, beside decodes
    {"max_num_seqs": 1},
    {"async_scheduling": True},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"executor": "processes"},
]


@pytest.mark.each_value
@pytest.mark.parametrize("how", SCHEDULING, ids=str)
@pytest.mark.parametrize(
    "layout", ["dp2 x ep2", "dp2 x tp2 x ep4", pytest.param("dp2 x ep2 x pp2", marks=pytest.mark.long)]
)
def test_tokens_of_groups_do_not_depend_on_scheduling(
    seven: Mixture, layout: str, how: dict[str, Any], shared_memory: None
) -> None:
    path, truth = seven
    assert answers(path, **EXPERTS, **GROUPS[layout][1], **how) == truth


def test_requests_of_a_group_are_preempted(seven: Mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    path, truth = seven
    monkeypatch.setattr(kv, "GROWTH", 1)  # or nobody would be let in who has to go again
    options = {**EXPERTS, "data_parallel_size": 2, "max_model_len": 70, "block_size": 2}
    plan = plan_for(path, "whole", dtype="float32", **options)
    # As much as the longest text and a block.
    size = (plan.kv_layout.blocks(70) + 1) * plan.block_bytes(0)
    with start(path, **options, kv_cache_memory_bytes=size) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        outputs = llm.generate(PROMPTS * 4, params, use_tqdm=False)
        assert llm.stats().preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == truth * 4


def test_one_request_at_a_time(seven: Mixture, shared_memory: None) -> None:
    """All other groups take each step empty; a prompt of one token, and answers in the order of the prompts."""
    path, truth = seven
    model = checkpoints.reference(path)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with start(path, **EXPERTS, data_parallel_size=3) as llm:
        for prompt, answer in [*zip(PROMPTS, truth, strict=True), ([7], greedy(model, [7], NEW))]:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == answer
        many = llm.generate(PROMPTS * 5, params, use_tqdm=False)
        stats = llm.stats()
    assert [output.outputs[0].token_ids for output in many] == truth * 5
    assert stats.running == stats.waiting == stats.blocks_used == 0
    assert stats.generation_tokens == NEW * (5 + 20)


def test_an_engine_of_groups_reports_and_sleeps(seven: Mixture) -> None:
    path, truth = seven
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with start(path, **EXPERTS, data_parallel_size=2, tensor_parallel_size=2) as llm:
        rows, experts = llm.layout(), llm.plan.shape.experts
        assert experts
        assert [row["replica"] for row in rows] == [0, 0, 1, 1]
        held = [number for row in rows for number in range(row["first_expert"], row["first_expert"] + row["experts"])]
        assert held == list(range(experts.count)), "the experts partition"
        assert [row["weight_bytes"] for row in rows] == [llm.plan.weight_bytes(rank) for rank in range(4)]
        assert sum(row["kv_bytes"] for row in rows) == llm.num_blocks * sum(map(llm.plan.block_bytes, range(4)))
        assert len(llm.rank_stats()) == 4
        llm.sleep(2)
        llm.wake_up()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == truth
        assert llm.forecast().plan is llm.plan
