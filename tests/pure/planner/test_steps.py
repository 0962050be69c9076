"""The seconds of one step agree with what predict makes of the same deployment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.names.catalogue import find
from weft.machine.hardware.cluster import parse_gpus
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import Workload, deploy
from weft.planner.profiles import engine_names, load_profile
from weft.planner.speed.steps import StepPredictor
from weft.planner.work.replica import PlannedReplica, build_replicas

SHAPES = {name: find(name).shape for name in ("Llama-3.1-8B", "gemma-3-27b-it", "Qwen3-30B-A3B", "DeepSeek-R1")}


def replica(
    model: str, gpus: str, *, engine: str = "vllm", tensor: int = 1, stages: int = 1, experts: bool = False
) -> PlannedReplica:
    shape, cluster = SHAPES[model], parse_gpus(gpus)
    each, rest = divmod(len(shape.layers), stages)
    layout = deploy(
        shape,
        Parallelism(
            tensor,
            expert_parallel=len(cluster.gpus) // stages if experts else 1,
            deals_experts=experts,
            pipeline_split=tuple(each + (stage < rest) for stage in range(stages)),
            devices=tuple(range(len(cluster.gpus))),
        ),
        precision="bf16",
        kv_dtype="bf16",
    )
    return build_replicas(shape, layout, cluster, load_profile(engine))[0]


CUTS = [("1xH200", 1, 1), ("2xH200", 2, 1), ("1xRTX4090+1xRTX3090", 2, 1), ("4xL40S", 1, 4), ("8xH100", 4, 2)]


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize(("gpus", "tensor", "stages"), CUTS)
@pytest.mark.parametrize("engine", engine_names())
def test_equal_rows_take_a_round(model: str, gpus: str, tensor: int, stages: int, engine: str) -> None:
    """With as many groups as stages under way, a round is the longer of one step and of all of them in turn."""
    run = replica(model, gpus, engine=engine, tensor=tensor, stages=stages)
    groups = stages if run.profile.pipelined.value else 1
    for each in (1, 7, 32, 300):
        found = StepPredictor(run).step_s([1536] * each, groups=groups)
        work = Workload(input_len=1024, output_len=1024)
        assert max(found.latency_s, groups * found.interval_s) == pytest.approx(run.round_s(each * groups, work).total)


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize(("gpus", "tensor", "stages"), CUTS)
def test_a_whole_prompt_takes_what_it_takes_alone(model: str, gpus: str, tensor: int, stages: int) -> None:
    run = replica(model, gpus, tensor=tensor, stages=stages)
    for length in (1, 100, 3000, 20_000):
        found = StepPredictor(run).step_s([], [(0, length)], ends=1)
        assert found.latency_s == pytest.approx(run.prompt_s(Workload(input_len=length, output_len=1)))


def test_replicas_that_share_experts_meet_each_others_tokens() -> None:
    shared = replica("Qwen3-30B-A3B", "4xH100", experts=True)
    work = Workload(input_len=100, output_len=100)
    assert StepPredictor(shared).step_s([150] * 8).latency_s == pytest.approx(shared.round_s(8, work).total)
    assert StepPredictor(shared).step_s([], [(0, 500)], ends=1).latency_s == pytest.approx(
        shared.prompt_s(Workload(input_len=500, output_len=1))
    )


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(sorted(SHAPES)),
    contexts=st.lists(st.integers(1, 5000), max_size=40),
    chunks=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 2000)), max_size=4),
    groups=st.integers(1, 4),
)
def test_rows_and_chunks_only_add(model: str, contexts: list[int], chunks: list[tuple[int, int]], groups: int) -> None:
    steps = StepPredictor(replica(model, "2xH200", stages=2))
    both = steps.step_s(contexts, chunks, ends=len(chunks), groups=groups)
    rows, read = steps.step_s(contexts, groups=groups), steps.step_s([], chunks, ends=len(chunks), groups=groups)
    idle = steps.step_s([], groups=groups)
    assert both.latency_s == pytest.approx(rows.latency_s + read.latency_s - idle.latency_s)
    assert both.interval_s == pytest.approx(rows.interval_s + read.interval_s - idle.interval_s)
    assert both.interval_s <= both.latency_s * (1 + 0.11 * (groups - 1))


@settings(deadline=None, max_examples=40)
@given(model=st.sampled_from(sorted(SHAPES)), length=st.integers(2, 20_000), cut=st.floats(0.0, 1.0))
def test_attention_of_a_prompt_is_that_of_its_chunks(model: str, length: int, cut: float) -> None:
    """One step that reads both halves as if they were two prompts' chunks: no token more, and no pair."""
    steps = StepPredictor(replica(model, "1xH200"))
    first = min(length - 1, max(1, round(cut * length)))
    whole = steps.step_s([], [(0, length)], ends=1)
    halves = steps.step_s([], [(0, first), (first, length - first)], ends=1)
    assert halves.latency_s == pytest.approx(whole.latency_s)
