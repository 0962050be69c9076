"""Attention groups that share one set of experts: planned, predicted, simulated, exported."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.pure.commands import weft, weft_json
from tests.pure.costs import cut
from tests.pure.machines import FOUR, MEASURED, host, plan, rig
from tests.pure.planner.test_execution import run as run_engine
from tests.pure.simulations import load, run
from tests.pure.study.test_export_gaps import exported_gaps
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names.catalogue import find
from weft.machine.hardware.cluster import parse_gpus
from weft.machine.hardware.links import LinkCost
from weft.plan.memory import Capacity, kv_blocks
from weft.plan.parallelism import Parallelism
from weft.plan.plan import DraftModel, Speculation
from weft.planner.deployment import deploy
from weft.planner.execution.forecast import forecast_plan
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.report import notes as plan_notes
from weft.planner.search.search import SearchResult, search
from weft.planner.speed.steps import StepPredictor
from weft.planner.work.exchange import ExchangeCost, exchange_cost, exchanging_ranks, parts_chosen
from weft.planner.work.replica import build_replicas
from weft.planner.work.roofline import experts_touched
from weft.study.simulate.lengths import FixedLength
from weft.study.simulate.replica_specs import SchedulerLimits, replica_specs

QWEN, MIX = find("Qwen3-30B-A3B").shape, find("Mixtral-8x7B").shape  # 8 of 128 experts, 2 of 8


def shared(shape: ModelShape, groups: int, tensor: int = 1, parts: int | None = None, stages: int = 1) -> Any:
    """Groups of `tensor` ranks in each stage, on GPUs of their own."""
    each, left_over = divmod(len(shape.layers), stages)
    return deploy(
        shape,
        Parallelism(
            tensor,
            expert_parallel=parts or tensor * groups,
            deals_experts=True,
            pipeline_split=tuple(each + (stage < left_over) for stage in range(stages)),
            devices=tuple(range(groups * tensor * stages)),
        ),
        precision="bf16",
        kv_dtype="bf16",
    )


def searched(model: str, gpus: str, **constraints: Any) -> SearchResult:
    question = Question(
        model=model,
        shape=find(model).shape,
        cluster=parse_gpus(gpus),
        engine="weft",
        precisions=("bf16",),
        constraints=Parallelism(**constraints),
    )
    return search(question)


# --- what is sent, and read ---


@pytest.mark.parametrize(("count", "top_k", "tokens"), [(4, 1, 3), (4, 2, 2), (3, 2, 3)])
def test_experts_touched_by_uniform_routers(count: int, top_k: int, tokens: int) -> None:
    """All choices of all tokens, each as likely as the others."""
    choices = [set(chosen) for chosen in product(range(count), repeat=top_k) if len(set(chosen)) == top_k]
    touched = [len(set().union(*chosen)) for chosen in product(choices, repeat=tokens)]
    assert experts_touched(count, top_k, tokens) == pytest.approx(sum(touched) / len(touched))


def test_parts_that_a_token_is_sent_to() -> None:
    experts = MIX.experts
    assert experts is not None
    assert parts_chosen(experts, 1) == 1 and parts_chosen(experts, 8) == pytest.approx(2)
    # The second choice lies in the part of the first one if it is one of its 3 others, of 7.
    assert parts_chosen(experts, 2) == pytest.approx(1 + 4 / 7)


def test_the_bytes_of_an_exchange() -> None:
    link = LinkCost(latency_s=0.0, s_per_byte=1.0)
    row, result = 2 * MIX.hidden + 2 * 8, 2 * MIX.hidden
    gather = exchange_cost(MIX, shared(MIX, 2), link)
    assert gather == ExchangeCost(link, row, result)
    assert gather.seconds(5, 12) == pytest.approx(12 * (row + result) / 2)  # of all groups, each half of an all-reduce
    dispatch = exchange_cost(MIX, shared(MIX, 4, tensor=2), link)
    assert dispatch is not None
    # Two ranks of a group divide its tokens, each of which goes to the ranks of its two experts.
    counts = 8
    assert dispatch.seconds(6, 20) == pytest.approx(counts + 3 * 2 * (row + result) / 2)
    assert dispatch.seconds(0, 20) == pytest.approx(counts + 20 / 8 * 2 * (row + result) / 2)  # it only receives
    # In a graph all groups gather what all of them pad to.
    in_graphs = exchange_cost(MIX, shared(MIX, 4, tensor=2), link, graphs=True)
    assert in_graphs is not None and in_graphs.seconds(6, 20) == pytest.approx(20 * (row + result) / 2)
    assert in_graphs.seconds(600, 2400) == dispatch.seconds(600, 2400), "a prompt"
    assert exchange_cost(MIX, cut(MIX, range(2), tensor=2, experts=True), link) is None


def test_the_ranks_that_exchange_tokens_are_those_of_one_stage() -> None:
    assert exchanging_ranks(MIX, shared(MIX, 2, tensor=2, parts=2, stages=2), 1) == [2, 6]
    assert exchanging_ranks(MIX, shared(MIX, 2, tensor=2, stages=2), 1) == [2, 3, 6, 7]


def test_a_group_without_tokens_takes_the_time_of_its_experts() -> None:
    layout, profile = shared(QWEN, 2), engine_profile(searched("Qwen3-30B-A3B", "2xH100").question)
    steps = StepPredictor(build_replicas(QWEN, layout, parse_gpus("2xH100"), profile)[0])
    idle, busy = steps.step_s([], routed=(16, 0)), steps.step_s([500] * 16, routed=(16, 0))
    assert 0 < idle.latency_s < busy.latency_s
    assert steps.step_s([500] * 16).latency_s > busy.latency_s  # the other group's tokens touch more experts
    assert steps.step_s([500] * 16, routed=(32, 0)) == steps.step_s([500] * 16)


# --- the search ---


def test_layouts_of_experts_are_weighed_or_refused() -> None:
    answer = searched("Mixtral-8x7B", "16xH100")
    names = {str(candidate.cut) for candidate in answer.candidates}
    assert {"TP 8 x DP 2, bf16", "TP 4 x DP 2 x PP 2, bf16"} & names, names
    refused = {str(miss.cut): miss.reason for miss in answer.rejected}
    assert refused["TP 16 x EP 16, bf16"].values["fault"] == "more-expert-ranks-than-experts"
    assert refused["TP 8 x DP 2 x EP 16, bf16"].values["fault"] == "more-expert-ranks-than-experts"


@pytest.mark.parametrize("asked", [None, True])
def test_attention_groups_of_gpus_are_weighed(asked: bool | None) -> None:
    """They run in CUDA graphs as other layouts do."""
    answer = searched("Mixtral-8x7B", "16xH100", deals_experts=asked)
    assert any(candidate.cut.parallelism.shares_experts for candidate in answer.candidates)
    refused = {miss.reason.values.get("fault") for miss in answer.rejected if miss.cut.parallelism.shares_experts}
    assert refused == {"more-expert-ranks-than-experts"}


def test_a_draft_model_has_no_attention_groups() -> None:
    question = searched("Qwen3-30B-A3B", "2xH100", tensor_parallel=1, data_parallel=2, deals_experts=True).question
    draft = DraftModel(model="d", checkpoint="", load_format="dummy", shape=find("Qwen3-0.6B").shape)
    for drafting, code in ((Speculation(tokens=3, draft=draft), "draft_of_groups"), (Speculation(tokens=3), None)):
        answer = search(
            Question(
                **{name: getattr(question, name) for name in question.__struct_fields__} | {"speculation": drafting}
            )
        )
        assert [miss.reason.code for miss in answer.rejected] == ([code] if code else [])
        assert bool(answer.best) is not bool(code)


EXPERTS_ON_GPUS = {"experts_one_by_one", "experts_not_measured"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["Qwen3-30B-A3B", "--gpus", "2xH100"], {"experts_not_measured"}),
        (["Qwen3-30B-A3B", "--gpus", "2xH100", "-dp", "2", "-ep"], {"experts_not_measured"}),
        (["Qwen3-30B-A3B", "--gpus", "2xH100", "--engine", "vllm"], set()),
        (["Qwen3-8B", "--gpus", "2xH100"], set()),
    ],
)
def test_what_is_slower_than_predicted_on_gpus_is_told(words: list[str], told: set[str]) -> None:
    assert EXPERTS_ON_GPUS.intersection(weft_json("plan", *words)[1]["note_codes"]) == told


def test_experts_of_another_activation_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_notes, "against_fused_experts", lambda *_: "they are not known")
    told = weft_json("plan", "Qwen3-30B-A3B", "--gpus", "2xH100")[1]["note_codes"]
    assert EXPERTS_ON_GPUS.intersection(told) == {"experts_one_by_one"}


def test_an_engine_deals_experts_as_the_search_says() -> None:
    where = rig(FOUR, FOUR, FOUR, FOUR)
    dealt = run_engine("Qwen3-30B-A3B", where, enable_expert_parallel=True)
    assert dealt.expert_parallel == 4 and len(dealt.places) == 4
    given = run_engine(
        "Qwen3-30B-A3B", where, enable_expert_parallel=True, data_parallel_size=4, expert_parallel_size=2
    )
    assert (given.data_parallel, given.tensor_parallel, given.expert_parallel) == (4, 1, 2)


# --- memory ---


@pytest.mark.parametrize("fields", [{"data_parallel_size": 2}, {"data_parallel_size": 3, "tensor_parallel_size": 2}])
@pytest.mark.parametrize("free", [10**12, 113 * 10**9])
def test_groups_on_a_cpu_share_its_kv_budget(fields: dict[str, int], free: int) -> None:
    where = host(memory_free_bytes=free)
    parts = 1 if fields["data_parallel_size"] == 2 else 6
    made = plan(
        where, MIX, enable_expert_parallel=True, expert_parallel_size=parts, max_num_batched_tokens=256, **fields
    )
    sizes = [made.weight_bytes(place.rank) for place in made.places]
    ranks = [
        Capacity(
            rank=rank,
            host="h",
            device="cpu",
            weight_bytes=size,
            activation_bytes=0,
            free_bytes=free - sum(sizes),
            block_bytes=made.block_bytes(rank),
            load_s=0.0,
        )
        for rank, size in enumerate(sizes)
    ]
    tokens = kv_blocks(made, ranks) * made.block_size * made.data_parallel
    # The forecast also leaves room for the processes.
    assert forecast_plan(made, where, MEASURED).kv_tokens == pytest.approx(tokens, rel=0.02 if free == 10**12 else 0.4)


def test_groups_have_as_many_blocks_as_the_one_with_the_least_room() -> None:
    """Seven experts on two ranks: the first holds one more."""
    answer = searched("Mixtral-8x7B", "3xH100", tensor_parallel=1, data_parallel=3, deals_experts=True)
    assert answer.best is not None
    groups = answer.best.memory.replicas
    assert len({sum(len(place.experts) for place in (answer.best.layout.places[group],)) for group in range(3)}) == 2
    assert len({group.kv_tokens for group in groups}) == 1


# --- simulation ---


def groups_of(gpus: str = "2xH100", **constraints: Any) -> Any:
    answer = searched("Qwen3-30B-A3B", gpus, tensor_parallel=1, deals_experts=True, **constraints)
    assert answer.best is not None
    return replica_specs(answer.question, answer.best, SchedulerLimits(lookahead=False))


def test_groups_are_one_engine_that_steps_together() -> None:
    (spec,) = groups_of(data_parallel=2)
    assert len(spec.predictors) == 2
    result = run([spec], load(FixedLength(64), FixedLength(16), rate=20.0), warmup_s=0.0, end_s=20.0)
    arrived = len(result.tally.arrivals)
    assert arrived > 300 and sum(result.tally.output_len) == 16 * arrived
    # A step ends when that of the slowest group does: no request is faster than alone in the engine.
    (alone,) = run([spec], load(FixedLength(64), FixedLength(16), rate=0.05), warmup_s=0.0, end_s=30.0).tally.e2e[:1]
    assert min(result.tally.e2e) >= alone * (1 - 1e-9)


def test_a_request_alone_waits_for_the_slowest_group() -> None:
    (spec,) = groups_of(data_parallel=2)
    result = run([spec], load(FixedLength(64), FixedLength(4), rate=0.05), warmup_s=0.0, end_s=60.0)
    first = max(
        spec.predictors[0].step_s([], [(0, 64)], ends=1, routed=(0, 64)).latency_s,
        spec.predictors[1].step_s([], routed=(0, 64)).latency_s,
    )
    decoded = [
        max(
            spec.predictors[0].step_s([at], routed=(1, 0)).latency_s,
            spec.predictors[1].step_s([], routed=(1, 0)).latency_s,
        )
        for at in (65, 66, 67)
    ]
    assert result.tally.ttft[0] == pytest.approx(first)
    assert result.tally.e2e[0] == pytest.approx(first + sum(decoded))


# --- exports ---


@pytest.mark.parametrize(
    ("target", "words", "flags", "absent"),
    [
        ("weft", "-tp 1 -dp 2 -ep", "--data-parallel-size 2 --enable-expert-parallel", "--expert-parallel-size"),
        ("weft", "-tp 2 -ep", "--tensor-parallel-size 2 --enable-expert-parallel", "--data-parallel-size"),
        (
            "weft",
            "-tp 1 -dp 2 -ep --expert-parallel-size 1",
            "--data-parallel-size 2 --enable-expert-parallel --expert-parallel-size 1",
            "--port 8001",
        ),
        ("vllm", "-tp 1 -dp 2 -ep", "--enable-expert-parallel --data-parallel-size 2", "--port 8001"),
        ("vllm", "-tp 1 -dp 2 -ep --expert-parallel-size 1", "--data-parallel-size 2", "--enable-expert-parallel"),
    ],
)
def test_commands_of_attention_groups(target: str, words: str, flags: str, absent: str) -> None:
    status, out, err = weft("plan", "Qwen3-30B-A3B", "--gpus", "2xH100", *words.split(), "--emit", target)
    assert status == 0, err
    command = out[out.index("serve ") :].replace(" \\\n   ", "")
    assert all(flag in command for flag in flags.split(" --")), command
    assert absent not in command


def test_vllm_deals_experts_to_all_ranks_or_none() -> None:
    words = "plan Qwen3-30B-A3B --gpus 4xH100 -tp 2 -dp 2 -ep --expert-parallel-size 2 --emit vllm"
    status, out, _ = weft(*words.split())
    assert status == 0 and "expert-parallel-size" not in out
    (gap,) = exported_gaps(words.replace("plan", "vllm").replace(" --emit vllm", ""))
    assert (gap.code, gap.values["wanted"]) == ("plan_replaced", "TP 2 x DP 2 x EP 2 x MoE TP 2, bf16")
    assert str(gap) in out.replace("\n#   ", " ")
