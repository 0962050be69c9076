"""Layout: what a config, a checkpoint and a machine come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.log_events import logged
from tests.pure.drawn_shapes import shapes
from tests.pure.machines import gpu, host, plan
from tests.pure.shapes import SMOLLM2, repeated, with_attention
from tests.refusals import refuses
from weft.checkpoint.architectures.kv import kv_bytes_per_token, kv_layout, kv_specs
from weft.checkpoint.architectures.shape import ModelShape
from weft.config import EngineConfig
from weft.engine.client.arguments import engine_config
from weft.errors import ConfigError, PlanError, WeftError
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Holder
from weft.plan.backends import ATTENTION_BACKENDS
from weft.plan.layout import layers_by_weight
from weft.plan.plan import Plan, named_devices

GPU_BACKENDS = [name for name, row in ATTENTION_BACKENDS.items() if row.runs_on == "gpu"]


def fails(code: str, *words: str, where: Host | None = None, shape: ModelShape = SMOLLM2, **flags: Any) -> None:
    """The error is one line and names all of `words`."""
    with refuses(WeftError, code) as caught:
        plan(where, shape, **flags)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_nothing_asked_for_on_a_cpu() -> None:
    got = plan()
    assert (got.tensor_parallel, got.stages, got.devices) == (1, 1, named_devices("cpu"))
    assert got.cores == ((0, 1, 4, 5),)
    assert got.dtype == "bfloat16" and got.max_model_len == 8192 and not got.max_model_len_given
    assert got.checkpoint == "/models/m" and got.load_format == "safetensors" and got.kv_cache_bytes is None


def test_a_plan_survives_json() -> None:
    got = plan(tensor_split=(2.0, 1.0), pipeline_split=(20, 10))
    assert msgspec.json.decode(msgspec.json.encode(got), type=Plan) == got


@given(shape=shapes(), tp=st.integers(1, 6), pp=st.integers(1, 4), cores=st.integers(1, 9))
def test_any_layout_is_whole(shape: ModelShape, tp: int, pp: int, cores: int) -> None:
    assume(tp <= shape.q_heads and pp <= len(shape.layers))
    got = plan(host(cores=tuple(range(cores))), shape, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert len(got.places) == len(got.devices) == len(got.cores) == len(got.gpu_memory_utilization) == tp * pp
    assert all(mine and set(mine) <= set(range(cores)) for mine in got.cores)
    if tp * pp <= cores:  # no core twice, and none idle
        assert sorted(core for mine in got.cores for core in mine) == list(range(cores))
    else:  # every core has its ranks, none more than one above another
        loads = [sum(core in mine for mine in got.cores) for core in range(cores)]
        assert max(loads) - min(loads) <= 1
    assert 0 <= got.output_rank < tp * pp and got.places[got.output_rank].last
    assert got.block_bytes(0) > 0


@given(
    shape=shapes(),
    gpus=st.integers(0, 3),
    cores=st.integers(1, 4),
    flags=st.fixed_dictionaries(
        {},
        optional={
            "tensor_parallel_size": st.integers(-1, 9),
            "tensor_split": st.lists(st.sampled_from([0.0, 1.0, 2.5]), max_size=4).map(tuple),
            "pipeline_parallel_size": st.integers(-1, 9),
            "pipeline_split": st.lists(st.integers(-1, 5), max_size=4).map(tuple),
            "device": st.sampled_from(["auto", "cpu", "cuda"]),
            "device_ids": st.lists(st.integers(-1, 3), max_size=4).map(tuple),
            "gpu_memory_utilization": st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=4).map(tuple),
            "max_model_len": st.integers(-1, 5000),
            "max_num_batched_tokens": st.integers(-1, 9),
            "block_size": st.integers(-1, 64),
        },
    ),
)
def test_whatever_is_asked_for_is_a_plan_or_advice(
    shape: ModelShape, gpus: int, cores: int, flags: dict[str, Any]
) -> None:
    try:
        got = plan(host(gpus, cores=tuple(range(cores))), shape, **flags)
    except (ConfigError, PlanError) as error:
        assert "\n" not in str(error)
        return
    ranks = len(got.places)
    assert ranks == got.tensor_parallel * got.stages == len(got.devices) == len(got.cores)
    assert all(mine for mine in got.cores)
    assert set(got.devices) <= {*named_devices("cpu", *(f"cuda:{n}" for n in range(gpus)))}
    assert 1 <= got.max_model_len <= shape.max_positions


# --- layers per stage ---


@given(shape=shapes(), stages=st.integers(1, 5))
def test_no_other_split_has_a_faster_slowest_stage(shape: ModelShape, stages: int) -> None:
    assume(stages <= len(shape.layers))
    head = shape.vocab * shape.hidden + shape.hidden
    layer = (plan_bytes(shape, 2) - plan_bytes(shape, 1)) // 2

    def slowest(split: list[int]) -> int:
        return max(*(n * layer for n in split[:-1]), split[-1] * layer + head, 0)

    got = layers_by_weight(shape, stages)
    assert sum(got) == len(shape.layers) and all(n >= 1 for n in got) and len(got) == stages
    assert slowest(got) == min(slowest(other) for other in compositions(len(shape.layers), stages))


def plan_bytes(shape: ModelShape, layers: int) -> int:
    """Bytes of a model of that shape with so many layers, in 16 bits."""
    from weft.plan.fills import rank_weight_bytes
    from weft.plan.places import cut_places

    shape = repeated(shape, layers)
    return rank_weight_bytes(shape, cut_places(shape, [1.0], [layers])[0], "float16")


def compositions(total: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[total]]
    return [[n, *rest] for n in range(1, total - parts + 2) for rest in compositions(total - n, parts - 1)]


def test_the_head_counts_as_layers() -> None:
    # SmolLM2's head is worth 8 of its 30 layers.
    assert layers_by_weight(SMOLLM2, 2) == [19, 11]
    assert layers_by_weight(SMOLLM2, 3) == [12, 13, 5]


def test_pipeline_split() -> None:
    assert [len(p.layers) for p in plan(pipeline_split=(1, 28, 1)).places] == [1, 28, 1]
    fails("pipeline-split-of-other-sum", "20,12", "30", pipeline_split=(20, 12))
    fails("more-stages-than-layers", "1 to 30", pipeline_parallel_size=31)
    fails("pipeline-split-of-other-size", "2 stages", "3", pipeline_split=(15, 15), pipeline_parallel_size=3)


def test_vllm_partition() -> None:
    where = host(environment={"VLLM_PP_LAYER_PARTITION": "20,10"})
    assert [len(p.layers) for p in plan(where).places] == [20, 10]
    assert [len(p.layers) for p in plan(where, pipeline_split=(10, 20)).places] == [10, 20]
    fails(
        "layer-partition-of-other-size",
        "VLLM_PP_LAYER_PARTITION",
        "2 stages",
        "3",
        where=where,
        pipeline_parallel_size=3,
    )
    fails(
        "bad-layer-partition",
        "VLLM_PP_LAYER_PARTITION",
        "'a,b'",
        where=host(environment={"VLLM_PP_LAYER_PARTITION": "a,b"}),
    )


def test_attention_backend(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong one is known before any weight is read; vLLM's variable with a backend of its own stops nothing."""
    fails("unknown-choice", "attention_backend", "'flash'", "auto, torch, cpu", attention_backend="flash")
    for value, backend in (("TORCH_SDPA", "torch"), ("CPU", "cpu"), ("", "auto")):
        assert plan(host(environment={"VLLM_ATTENTION_BACKEND": value})).attention_backend == backend
    assert (
        plan(host(environment={"VLLM_ATTENTION_BACKEND": "CPU"}), attention_backend="torch").attention_backend
        == "torch"
    )
    assert not caplog.records
    # What vLLM alone has, and what needs a GPU that is not here.
    for value in ("XFORMERS", "FLASH_ATTN"):
        assert plan(host(environment={"VLLM_ATTENTION_BACKEND": value})).attention_backend == "auto"
        assert value in caplog.text


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("FLASHINFER", "flashinfer"),
        ("FLASH_ATTN", "varlen"),
        ("FLASH_ATTN_VLLM_V1", "varlen"),
        ("TRITON_ATTN", "triton"),
        ("TORCH_SDPA", "torch"),
        ("varlen", "varlen"),
    ],
)
def test_attention_backends_have_vllm_s_names_too(theirs: str, ours: str, caplog: pytest.LogCaptureFixture) -> None:
    assert plan(host(1), attention_backend=theirs).attention_backend == ours
    assert plan(host(1, environment={"VLLM_ATTENTION_BACKEND": theirs})).attention_backend == ours
    assert not caplog.records


def test_kernels_of_a_cpu_run_on_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """Torch's would take their place, many times slower, and nobody would know why."""
    fails(
        "attention-backend-not-usable",
        "CPU kernels",
        "not on GPUs",
        where=host(1),
        attention_backend="CPU_ATTN",
    )
    assert plan(host(1), attention_backend="cpu", device="cpu").attention_backend == "cpu"
    assert plan(host(1, environment={"VLLM_ATTENTION_BACKEND": "CPU"})).attention_backend == "auto"
    assert logged(caplog, "attention-variable-ignored") == [{"value": "CPU"}]


def test_kernels_of_gpus_run_on_no_cpu() -> None:
    for backend in GPU_BACKENDS:
        fails(
            "attention-backend-not-usable",
            "not on a CPU",
            attention_backend=backend,
        )
    interpreted = host(environment={"TRITON_INTERPRET": "1"})
    assert plan(interpreted, attention_backend="triton").attention_backend == "triton"
    assert plan(host(1), attention_backend="flashinfer", kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    fails(
        "attention-backend-not-usable",
        "FP8",
        "varlen",
        where=host(1),
        attention_backend="varlen",
        kv_cache_dtype="fp8",
    )


def test_a_kv_cache_that_a_device_does_not_have() -> None:
    fails("kv-cache-dtype-not-supported", "fp8", "on a CPU", "--kv-cache-dtype", kv_cache_dtype="fp8")
    old = host((gpu(0, capability=(8, 0)),))
    fails("kv-cache-dtype-not-supported", "8.0", "8.9", "--kv-cache-dtype", where=old, kv_cache_dtype="fp8")
    with refuses(ConfigError, "unknown-choice", "kv_cache_dtype", "fp3", "fp8"):
        engine_config("m", {"kv_cache_dtype": "fp3"})


def test_kernels_that_are_not_installed_are_refused_before_weights_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks would refuse them too, but only after they have read all weights."""
    bare = host(1, packages={"triton": "3.6.0"})
    fails(
        "attention-backend-not-usable",
        "FlashInfer's kernels",
        "weft-llm[cuda]",
        where=bare,
        attention_backend="flashinfer",
    )
    old = host(1, packages={"triton": "3.6.0", "flashinfer-python": "0.4.1"})
    fails("attention-backend-not-usable", "flashinfer-python 0.4.1", "0.5", where=old, attention_backend="flashinfer")
    for backend in GPU_BACKENDS:
        fails("attention-backend-not-usable", "package triton", where=host(1, packages={}), attention_backend=backend)
    # Set for vLLM, which may have it where we do not.
    here = host(1, packages={"triton": "3.6.0"}, environment={"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    assert plan(here).attention_backend == "auto" and "FLASHINFER" in caplog.text
    fp8 = host(1, environment={"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"})
    assert plan(fp8, kv_cache_dtype="fp8").attention_backend == "auto" and "FLASH_ATTN" in caplog.text


def test_kernels_that_cannot_run_a_model_are_refused_before_weights_are_read() -> None:
    turing = host((gpu(0, capability=(7, 5)),))
    for backend in ("flashinfer", "varlen"):
        fails(
            "attention-backend-not-usable",
            "7.5",
            "8.0",
            "--attention-backend",
            where=turing,
            attention_backend=backend,
            dtype="float16",
        )
        fails("attention-backend-not-usable", "float32", where=host(1), attention_backend=backend, dtype="float32")
    volta = host((gpu(0, capability=(7, 0)),))
    for backend in GPU_BACKENDS:
        fails(
            "attention-backend-not-usable",
            "the Triton kernels",
            "7.0",
            "7.5",
            where=volta,
            attention_backend=backend,
            dtype="float16",
        )
    wide = with_attention(SMOLLM2, head_dim=320)
    fails(
        "attention-backend-not-usable",
        "256",
        "320",
        where=turing,
        shape=wide,
        attention_backend="triton",
        dtype="float16",
    )
    for backend, dims in (("flashinfer", 80), ("varlen", 260)):
        shape = with_attention(SMOLLM2, head_dim=dims)
        fails("attention-backend-not-usable", str(dims), where=host(1), shape=shape, attention_backend=backend)
    fails("attention-backend-not-usable", "bfloat16 and float32", "float16", attention_backend="cpu", dtype="float16")


# --- shares ---


def test_tensor_split() -> None:
    assert [len(p.q_heads) for p in plan(tensor_split=(1, 2)).places] == [3, 6]
    assert [len(p.q_heads) for p in plan(tensor_split=(100, 1)).places] == [6, 3]
    assert plan(tensor_split=(2, 1), tensor_parallel_size=2).tensor_parallel == 2
    fails("empty-tensor-split", "tensor_split", tensor_split=())
    fails("tensor-split-of-other-size", "2 weights", "3", tensor_split=(2, 1), tensor_parallel_size=3)
    fails("more-ranks-than-heads", "10", "1 to 9", tensor_parallel_size=10)
    fails("more-ranks-than-heads", "1 to 9", tensor_split=(1,) * 10)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        fails("bad-tensor-split-weight", "tensor_split", str(bad), tensor_split=(1.0, bad))


# --- devices ---


def test_gpus_are_used_where_there_are_any() -> None:
    assert plan(host(2), tensor_parallel_size=2).devices == named_devices("cuda:0", "cuda:1")
    assert plan(host(2), device="cpu").devices == named_devices("cpu")
    assert plan(host(3), tensor_parallel_size=2, device_ids=(2, 0)).devices == named_devices("cuda:2", "cuda:0")
    assert plan(host(1), tensor_parallel_size=2, device_ids=(0, 0)).devices == named_devices("cuda:0", "cuda:0")


def test_gpus_that_are_not_there() -> None:
    fails("no-gpu-visible", "--device cpu", device="cuda")
    fails("more-ranks-than-gpus", "4 ranks", "2", "--device-ids 0,1,0,1", where=host(2), tensor_parallel_size=4)
    fails("device-ids-beyond-gpus", "GPU 2", "0 to 1", where=host(2), device_ids=(2,))
    fails("device-ids-beyond-gpus", "GPU -1", where=host(2), device_ids=(-1,))
    fails("device-ids-not-per-rank", "2 GPUs", "1 rank;", where=host(2), device_ids=(0, 1))
    fails("device-ids-on-cpu", "device_ids 0", device_ids=(0,))


def test_utilization_is_one_figure_or_one_per_rank() -> None:
    assert plan(host(2), tensor_parallel_size=2).gpu_memory_utilization == (0.9, 0.9)
    got = plan(host(2), tensor_parallel_size=2, gpu_memory_utilization=(0.5, 0.8))
    assert got.gpu_memory_utilization == (0.5, 0.8)
    fails(
        "utilization-not-per-rank",
        "3",
        "2 ranks",
        where=host(2),
        tensor_parallel_size=2,
        gpu_memory_utilization=(0.5, 0.8, 0.1),
    )
    fails("bad-utilization", "1.5", gpu_memory_utilization=(1.5,))
    fails("bad-utilization", "0.0", gpu_memory_utilization=(0.0,))


def test_omp_num_threads_limits_threads_and_binds_to_no_fewer_cores() -> None:
    """Engines side by side, each told to use one thread, would otherwise all share the first core."""
    for limit, threads in ((1, 1), (99, 2), (None, 2)):
        got = plan(host(threads=limit), tensor_parallel_size=2)
        assert got.cores == ((0, 1), (4, 5))
        assert [got.threads(rank) for rank in range(2)] == [threads, threads]
    assert plan(host(cores=(7,)), tensor_parallel_size=3).cores == ((7,), (7,), (7,))


# --- dtype ---


@pytest.mark.parametrize(
    ("own", "kind", "asked", "expected"),
    [
        ("bfloat16", "safetensors", "auto", "bfloat16"),
        ("float16", "safetensors", "auto", "float16"),
        ("float32", "safetensors", "auto", "bfloat16"),
        ("float32", "gguf", "auto", "bfloat16"),
        ("float16", "gguf", "auto", "bfloat16"),
        ("bfloat16", "gguf", "half", "float16"),
        ("bfloat16", "safetensors", "float", "float32"),
        ("bfloat16", "dummy", "auto", "bfloat16"),
    ],
)
def test_dtype(own: str, kind: str, asked: str, expected: str) -> None:
    shape = msgspec.structs.replace(SMOLLM2, dtype=own)
    assert plan(None, shape, kind, dtype=asked).dtype == expected


def test_a_gpu_that_cannot_compute_in_bfloat16() -> None:
    where = host(gpus=(gpu(0), gpu(1, capability=(7, 5))))
    assert plan(where).dtype == "bfloat16"  # it runs on the other one
    assert plan(where, tensor_parallel_size=2).dtype == "float16"
    fails("gpu-without-bfloat16", "7.5", "float16", where=where, tensor_parallel_size=2, dtype="bfloat16")


# --- limits ---


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "kv_cache_memory_bytes",
    ],
)
def test_counts_start_at_one(name: str) -> None:
    for value in (0, -3):
        fails("below-minimum", name, str(value), **{name: value})
    plan(**{name: 1})


@pytest.mark.parametrize("name", ["dtype", "device", "scheduling_policy", "executor"])
def test_choices_are_listed(name: str) -> None:
    fails("unknown-choice", name, "'fp8'", **{name: "fp8"})


def test_max_model_len() -> None:
    got = plan(max_model_len=100)
    assert got.max_model_len == 100 and got.max_model_len_given
    fails("beyond-model-length", "8193", "8192", max_model_len=8193)


def test_weights_that_do_not_fit() -> None:
    where = host(gpus=(gpu(0, free=100e6), gpu(1, free=100e6), gpu(2, free=100e6)))
    fails("weights-exceed-free-memory", "0.3 GB", "cuda:0", "0.1 GB", "--tensor-parallel-size", where=where)
    assert len(plan(where, tensor_parallel_size=3).places) == 3
    # Who holds the memory is named.
    game = msgspec.structs.replace(gpu(0, free=100e6), holders=(Holder(7, "/games/planet", 10**9),))
    fails("weights-exceed-free-memory", "0.1 GB", "planet (pid 7) 1.0 GB", where=host(gpus=(game,)))
    # Ranks on one device add up.
    fails("weights-exceed-free-memory", "cuda:0", where=where, tensor_parallel_size=3, device_ids=(0, 0, 0))
    fails("weights-exceed-free-memory", "0.3 GB", "here", where=host(memory_free_bytes=10**8), tensor_parallel_size=3)


def test_errors_are_weft_s() -> None:
    assert issubclass(ConfigError, WeftError) and issubclass(PlanError, WeftError)
    config = EngineConfig(model="m")
    assert replace(config, seed=1).seed == 1
    fails("below-minimum", "seed", "-1", seed=-1)


def test_layers_that_differ_in_their_heads_are_planned_and_not_run() -> None:
    """Memory is counted layer by layer. The kernels of a rank are made for one kind of attention."""
    layers = list(SMOLLM2.layers)
    other = msgspec.structs.replace(layers[1].mixer, kv_heads=1, head_dim=128)
    layers[1::2] = [msgspec.structs.replace(layer, mixer=other) for layer in layers[1::2]]
    shape = msgspec.structs.replace(SMOLLM2, layers=tuple(layers))
    assert kv_bytes_per_token(shape) == 15 * 2 * 2 * (3 * 64 + 1 * 128)
    assert [spec.bytes_per_token for spec in kv_specs(shape).values()] == [2 * 2 * 3 * 64, 2 * 2 * 128] * 15
    (first, second) = kv_layout(shape, block_size=16, chunk=64).groups
    assert (first.layers, second.layers) == (tuple(range(0, 30, 2)), tuple(range(1, 30, 2)))
    with refuses(PlanError, "several-kinds-of-attention", "9 query and 1 KV heads of 128", "3 KV heads of 64"):
        plan(shape=shape)


def test_a_plan_logs_what_decided_its_kernels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="weft")
    plan(host(environment={"VLLM_ATTENTION_BACKEND": "TORCH_SDPA"}), dtype="float32")
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("dtype ")]
    assert line == "dtype float32 (--dtype), attention torch (VLLM_ATTENTION_BACKEND), products own (the default)"
