"""The number of tokens of a step: answers do not wait long, and the KV cache keeps its room."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.costs import cut
from weft.checkpoint.names.catalogue import find
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus
from weft.machine.hardware.gpus import find_gpu
from weft.planner.deployment import Workload
from weft.planner.memory.footprint import ReplicaMemory, footprint
from weft.planner.profiles import Constant, EngineProfile, engine_profile, load_profile
from weft.planner.question import Question
from weft.planner.work.batch import FULL, KV_SHARE_FOR_STEP, TokenBudget, token_budgets, with_token_budget
from weft.planner.work.replica import PlannedReplica, build_replicas

WEFT = load_profile("weft")
LIMIT_S = WEFT.hold_up_ms.value * 1e-3
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3-32B")


def replica(
    model: str, gpus: str, stages: int = 1, tensor: int = 1, **limits: float
) -> tuple[PlannedReplica, EngineProfile]:
    shape, cluster = find(model).shape, parse_gpus(gpus)
    own = msgspec.structs.replace(WEFT, **{name: Constant(value, "a test") for name, value in limits.items()})
    layout = cut(shape, range(stages * tensor), stages=stages, tensor=tensor)
    return build_replicas(shape, layout, cluster, own)[0], own


def best(*asked: Any, longest: int = 32_768, **limits: float) -> TokenBudget:
    return next(token_budgets(*replica(*asked, **limits), longest))


def memory(model: str, cluster: Cluster, own: EngineProfile = WEFT, workload: Workload | None = None) -> ReplicaMemory:
    shape = find(model).shape
    return footprint(shape, cut(shape, [0]), cluster, own, workload).replicas[0]


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"),
    [
        ("Qwen3-0.6B", "1xH200", 16_384),
        ("Qwen3-8B", "1xH200", 8192),
        ("Qwen3-32B", "1xH200", 2048),
        ("Llama-3.1-8B", "1xRTX4090", 1024),
        ("Llama-3.1-8B", "1xRTX3060", 512),
    ],
)
def test_faster_gpus_and_smaller_models_get_longer_steps(model: str, gpus: str, tokens: int) -> None:
    assert best(model, gpus).tokens == tokens


@settings(deadline=None, max_examples=60)
@given(
    model=st.sampled_from(MODELS),
    gpu=st.sampled_from(["H200", "H100", "RTX 4090", "L40S", "T4", "B200"]),
    limit_ms=st.floats(1.0, 2000.0),
    sequences=st.sampled_from([1, 64, 256, 1000]),
    longest=st.sampled_from([64, 2048, 131_072]),
)
def test_the_first_choice_is_the_largest_that_nobody_waits_long_for(
    model: str, gpu: str, limit_ms: float, sequences: int, longest: int
) -> None:
    run, own = replica(model, f"1x{gpu}", hold_up_ms=limit_ms, max_num_seqs=sequences)
    found = list(token_budgets(run, own, longest))
    sizes = [choice.tokens for choice in found]
    assert sizes == sorted(sizes, reverse=True) and all(size & (size - 1) == 0 for size in sizes)
    assert sizes[-1] == max(512, 1 << (2 * sequences - 1).bit_length())
    assert sizes[0] <= max(16_384, sizes[-1])
    if len(sizes) > 1:
        # Within the limit, or half of it would waste more.
        took, half = run.full_step_s(sizes[0], longest), run.full_step_s(sizes[0] // 2, longest)
        assert took <= limit_ms * 1e-3 or took <= 2 * (1 - FULL) * half
    if sizes[0] < 16_384 and 2 * sizes[0] <= sequences * longest:
        assert run.full_step_s(2 * sizes[0], longest) > limit_ms * 1e-3


def test_a_step_is_no_longer_than_all_requests_together() -> None:
    assert best("Qwen3-0.6B", "1xH200", longest=64, max_num_seqs=30).tokens == 2048


def test_stages_wait_for_each_other_less_in_short_steps() -> None:
    assert best("Qwen3-0.6B", "4xH200", 4).tokens < best("Qwen3-0.6B", "1xH200").tokens
    run, own = replica("Llama-3.1-70B", "8xH100", 8)
    work = Workload(input_len=1024, output_len=256)
    first, *_ = list(token_budgets(run, own, 8192))
    assert (first.tokens, first.bound) == (512, "pipeline")
    assert run.throughput(384, work, first.tokens) > 1.3 * run.throughput(384, work, 2048)


def test_experts_of_which_a_token_meets_few_need_longer_steps() -> None:
    """Streaming such experts takes longer than multiplying with them."""
    tight = {"hold_up_ms": 1.0}
    assert best("Qwen3-30B-A3B", "1xH200", **tight).tokens > best("Qwen3-8B", "1xH200", **tight).tokens


@settings(deadline=None, max_examples=60)
@given(model=st.sampled_from(MODELS), gib=st.floats(2.0, 140.0), gpu=st.sampled_from(["H200", "RTX 4090"]))
def test_the_kv_cache_keeps_its_room(model: str, gib: float, gpu: str) -> None:
    spec = msgspec.structs.replace(find_gpu(gpu), memory_bytes=int(gib * 2**30))
    cluster = Cluster((Node((spec,), "pcie"),), 1.0)
    found = memory(model, cluster)
    least = memory(model, cluster, with_token_budget(WEFT, TokenBudget(512, "")))
    assert found.kv_tokens >= (1 - KV_SHARE_FOR_STEP) * least.kv_tokens
    assert (found.kv_tokens >= found.length) == (least.kv_tokens >= least.length)
    assert not found.takes_more(least)
    if found.batched_tokens == 512:
        assert found == msgspec.structs.replace(least, batched_reason=found.batched_reason)


def test_the_reason_says_which_bound_it_is() -> None:
    pause = best("Qwen3-8B", "1xH200")
    assert pause.bound == "pause" and "250 ms" in pause.reason
    assert best("Qwen3-0.6B", "1xH200").bound == "limit"
    assert best("Llama-3.1-8B", "1xRTX3060").bound == "weights"
    small = msgspec.structs.replace(find_gpu("H200"), memory_bytes=int(3.6 * 2**30))
    found = memory("Qwen3-0.6B", Cluster((Node((small,), "pcie"),), 1.0))
    assert found.batched_tokens < 16_384 and f"{KV_SHARE_FOR_STEP:.0%}" in found.batched_reason


def test_a_flag_is_obeyed_and_other_engines_keep_their_own() -> None:
    fixed = msgspec.structs.replace(
        WEFT, hold_up_ms=Constant(0.0, ""), max_num_batched_tokens=Constant(3000, "--max-num-batched-tokens")
    )
    found = memory("Qwen3-8B", parse_gpus("1xH200"), fixed)
    assert (found.batched_tokens, found.batched_reason) == (3000, "--max-num-batched-tokens")
    assert memory("Qwen3-8B", parse_gpus("1xH200"), load_profile("vllm")).batched_tokens == 8192
    asked = Question(
        model="m", shape=find("Qwen3-8B").shape, cluster=parse_gpus("1xRTX4090"), engine="vllm", precisions=("bf16",)
    )
    for engine in ("weft", "vllm"):
        own = engine_profile(msgspec.structs.replace(asked, engine=engine, max_num_batched_tokens=10_000))
        assert memory("Qwen3-8B", asked.cluster, own).batched_tokens == 10_000
    assert memory("Qwen3-8B", parse_gpus("1xRTX4090"), load_profile("vllm")).batched_tokens == 2048
