"""Bytes that a layout's GPUs hold: exact where possible, and never worse with more memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.architectures.kv import kv_bytes_per_token
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names.catalogue import find
from weft.checkpoint.quantised.precision import weight_bytes
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus
from weft.machine.hardware.gpus import find_gpu
from weft.plan.memory import LOGITS_BYTES
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import DeploymentLayout, Workload, deploy
from weft.planner.memory.footprint import BLOCK, Footprint, footprint
from weft.planner.profiles import engine_names, load_profile
from weft.planner.work.batch import TokenBudget, with_token_budget

GIB = 1 << 30
LLAMA, QWEN_72B = find("Llama-3.1-8B").shape, find("Qwen2.5-72B-Instruct").shape
GPT_OSS, DEEPSEEK = find("gpt-oss-120b").shape, find("DeepSeek-R1").shape


def cut(
    shape: ModelShape,
    ranks: int,
    *,
    tensor: int | None = None,
    stages: tuple[int, ...] | None = None,
    precision: str = "bf16",
    kv_dtype: str = "bf16",
    experts: bool = False,
) -> DeploymentLayout:
    return deploy(
        shape,
        Parallelism(
            tensor or ranks,
            expert_parallel=ranks // len(stages or (0,)) if experts else 1,
            deals_experts=experts,
            pipeline_split=tuple(stages or (len(shape.layers),)),
            devices=tuple(range(ranks)),
        ),
        precision=precision,
        kv_dtype=kv_dtype,
    )


def held(shape: ModelShape, layout: DeploymentLayout, gpus: str, engine: str = "vllm", length: int = 2048) -> Footprint:
    workload = Workload(max_model_len=length)
    return footprint(shape, layout, parse_gpus(gpus), load_profile(engine), workload)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4", "q4_k_m"])
@pytest.mark.parametrize(("tensor", "stages"), [(1, (80,)), (2, (80,)), (4, (80,)), (2, (45, 35)), (3, (80,))])
def test_weights_and_kv_of_the_ranks_are_the_places_own(precision: str, tensor: int, stages: tuple[int, ...]) -> None:
    ranks = tensor * len(stages)
    layout = cut(QWEN_72B, ranks, tensor=tensor, stages=stages, precision=precision)
    memory = held(QWEN_72B, layout, f"{ranks}xH200")
    for rank, place in zip(memory.ranks, layout.places, strict=True):
        assert rank.weights.total == weight_bytes(QWEN_72B, precision, place)
        assert rank.kv_bytes_per_token == kv_bytes_per_token(QWEN_72B, "bf16", place)
    assert sum(rank.kv_bytes_per_token for rank in memory.ranks) == 327_680  # eight KV heads, however they are cut


def test_activations_are_as_wide_as_what_is_computed_in() -> None:
    """Logits are float32 whatever it is; all else of a step takes twice as much in 32 bits as in 16."""
    weft = with_token_budget(load_profile("weft"), TokenBudget(1024, "this test"))
    wide, usual, four = (
        footprint(LLAMA, cut(LLAMA, 1, precision=it), parse_gpus("1xH100"), weft).ranks[0].activation_bytes
        for it in ("fp32", "bf16", "int4")
    )
    logits = LOGITS_BYTES * 256 * LLAMA.vocab
    assert wide - logits == 2 * (usual - logits) and usual == four


def test_every_byte_of_what_is_used_is_accounted_for() -> None:
    for engine in engine_names():
        for rank in held(LLAMA, cut(LLAMA, 2), "2xL40S", engine).ranks:
            assert rank.usable_bytes == rank.weights.total + rank.other_bytes + rank.kv_room_bytes
            assert rank.usable_bytes <= rank.memory_bytes


def test_tokens_are_the_minimum_over_ranks() -> None:
    layout = cut(LLAMA, 2, tensor=1, stages=(24, 8))
    memory = held(LLAMA, layout, "2xL40S")
    rooms = [rank.kv_room_bytes / rank.kv_bytes_per_token for rank in memory.ranks]
    assert rooms[0] < rooms[1]
    assert memory.fullest == 0
    assert memory.kv_tokens == int(rooms[0]) // BLOCK * BLOCK


def test_concurrency_is_tokens_over_length() -> None:
    memory = held(LLAMA, cut(LLAMA, 1), "1xH100")
    assert memory.max_concurrency(4096) == pytest.approx(memory.kv_tokens / 4096, rel=1e-3)
    assert memory.max_concurrency(8192) == pytest.approx(memory.max_concurrency(4096) / 2)


def test_replicas_add_up() -> None:
    one, three = held(LLAMA, cut(LLAMA, 1), "1xL40S"), held(LLAMA, cut(LLAMA, 3, tensor=1), "3xL40S")
    assert three.kv_tokens == 3 * one.kv_tokens
    assert three.max_concurrency(4096) == pytest.approx(3 * one.max_concurrency(4096))
    assert three.longest == one.longest


def test_the_longest_request_just_fits() -> None:
    # 16 GB of weights in 24: less than the model's own length.
    memory = held(LLAMA, cut(LLAMA, 1), "1xRTX4090")
    assert 2048 < memory.longest < LLAMA.longest
    assert memory.max_concurrency(memory.longest) >= 1 > memory.max_concurrency(memory.longest + 1)


def test_windows_save_cache_where_the_engine_does() -> None:
    layout = cut(GPT_OSS, 1, precision="mxfp4")
    engines = ("vllm", "weft", "transformers")
    saving, ours, keeping = (held(GPT_OSS, layout, "1xH200", engine, 32_768) for engine in engines)
    each = [memory.ranks[0].kv_room_bytes / memory.kv_tokens for memory in (saving, ours, keeping)]
    # Every other layer keeps 128 tokens; our blocks are whole, and one request is still being read in chunks.
    assert each[0] == pytest.approx(each[2] / 2, rel=0.02)
    assert each[1] == pytest.approx(each[2] / 2, rel=0.03)


def test_latent_attention_caches_the_same_on_every_rank() -> None:
    memory = held(DEEPSEEK, cut(DEEPSEEK, 8, precision="fp8"), "8xH200")
    assert {rank.kv_bytes_per_token for rank in memory.ranks} == {70_272}


@pytest.mark.parametrize("length", [2049, 32_768])
def test_a_tight_fit_gives_up_the_usual_settings_for_one_request(length: int) -> None:
    # Qwen2.5-72B runs on two A100 80 GB in the published table: 72.7 GB of weights in 85.9.
    memory = held(QWEN_72B, cut(QWEN_72B, 2), "2xA100", length=length)
    roomy = held(QWEN_72B, cut(QWEN_72B, 4), "4xA100", length=length)
    assert memory.fits
    assert memory.kv_tokens == length
    assert memory.ranks[0].activation_bytes < roomy.ranks[0].activation_bytes
    assert all(rank.usable_bytes <= 0.98 * rank.memory_bytes for rank in memory.ranks)


def test_a_model_that_cannot_fit_does_not() -> None:
    memory = held(QWEN_72B, cut(QWEN_72B, 1), "1xH100")
    assert not memory.fits
    assert memory.kv_tokens == 0
    assert memory.longest == 0
    assert memory.ranks[0].kv_room_bytes < -60e9


@settings(deadline=None)
@given(
    engine=st.sampled_from(engine_names()),
    tensor=st.sampled_from([1, 2, 4]),
    memory=st.integers(4 * GIB, 200 * GIB),
    more=st.integers(0, 64 * GIB),
    length=st.integers(1, 131_072),
)
def test_more_memory_never_makes_a_fitting_plan_unfit(
    engine: str, tensor: int, memory: int, more: int, length: int
) -> None:
    workload, layout = Workload(max_model_len=length), cut(LLAMA, tensor)
    small, large = (
        footprint(LLAMA, layout, of_memory(tensor, size), load_profile(engine), workload)
        for size in (memory, memory + more)
    )
    assert large.fits or not small.fits
    # Past the point where an engine's usual settings grow with the card, more memory may hold less beside them.
    if load_profile(engine).small_GiB.value == 0:
        assert large.kv_tokens >= small.kv_tokens


def of_memory(count: int, size: int) -> Cluster:
    gpu = msgspec.structs.replace(find_gpu("L40S"), memory_bytes=size)
    return Cluster((Node((gpu,) * count, "pcie"),), 1e9)
