"""An engine runs the plan that weft plan prints: from the search if no flag cuts the model, and from a plan file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.commands import parsed, refused_line, weft, weft_json
from tests.pure.machines import FOUR, H100, NOTHING, SIX, T4, THREE, checkpoint, host, rig
from tests.refusals import has_values, refusals, refuses
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.cli.flags.flags import engine_config
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError, WeftError
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Holder
from weft.plan.layout import build_plan
from weft.plan.plan import Plan, named_devices
from weft.planner.execution import config_search, execution
from weft.planner.execution.execution import plan_to_run
from weft.planner.report import plan_file
from weft.planner.search.search import search
from weft.probes.machine import host_cluster


def run(model: str, where: Host, **flags: Any) -> Plan:
    there = checkpoint(model)
    return plan_to_run(EngineConfig(model=there.model, **flags), there, where)


def told(model: str, where: Host, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """JSON of weft plan MODEL WORDS on that machine."""
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda *_: where)
    monkeypatch.setattr("weft.probes.stored_speeds.load_speeds", lambda _: NOTHING)
    monkeypatch.setattr("weft.probes.stored_speeds.cpu_speed_of", lambda *_, **__: CpuSpeed(40e9, 0.3e12))
    return weft_json("plan", model, *words)[1]


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.probes.stored_speeds.load_speeds", lambda _: NOTHING)


# --- by itself ---

HOSTS = [
    ("Llama-3.1-8B", [FOUR]),
    ("Llama-3.1-8B", [FOUR, FOUR]),
    ("Qwen3-14B", [FOUR, FOUR]),
    ("Qwen3-14B", [FOUR, THREE]),
    ("Qwen3-32B", [SIX, FOUR]),
    ("Qwen3-32B", [FOUR, FOUR, FOUR, FOUR]),
    ("Qwen3-14B", [FOUR, FOUR, FOUR]),
    ("Qwen3-32B", [FOUR, SIX, FOUR]),
    ("Llama-3.1-70B", [H100] * 8),
    ("Llama-3.1-70B", [FOUR] * 8),
    ("Llama-3.1-8B", [T4, T4]),
]


@pytest.mark.parametrize(("model", "names"), HOSTS, ids=lambda it: it if isinstance(it, str) else "+".join(it))
def test_an_engine_runs_the_plan_of_weft_plan(
    model: str, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = rig(*names)
    plan, best = run(model, where), told(model, where, monkeypatch)["best"]
    ranks = best["ranks"][: best["tensor_parallel"] * best["pipeline_parallel"]]
    assert len(plan.places) == len(ranks)
    assert plan.max_num_batched_tokens == best["max_num_batched_tokens"]
    assert {"bfloat16": "bf16", "float16": "fp16"}[plan.dtype] == best["precision"]
    for place, device, rank in zip(plan.places, plan.devices, ranks, strict=True):
        assert device.name == f"cuda:{rank['gpu_index']}"
        assert msgspec.to_builtins(device) == rank["device"]
        assert (place.layers.start, len(place.layers)) == (rank["first_layer"], rank["layers"])
        assert (place.q_heads.start, len(place.q_heads)) == (rank["first_q_head"], rank["q_heads"])
        assert (place.kv_heads.start, len(place.kv_heads)) == (rank["first_kv_head"], rank["kv_heads"])
        assert len(place.ffn) == rank["ffn"]


@pytest.mark.parametrize(("model", "names"), HOSTS, ids=lambda it: it if isinstance(it, str) else "+".join(it))
def test_the_places_are_the_search_s_own(model: str, names: Sequence[str]) -> None:
    where, there = rig(*names), checkpoint(model)
    config = EngineConfig(model=there.model)
    numbers = range(len(names))
    best = search(config_search.plan_question(config, there, where, host_cluster(where, NOTHING), numbers)).best
    assert best is not None
    assert run(model, where).places == best.layout.places[: best.layout.parallelism.replica_size]


def test_the_objective_chooses_the_layout() -> None:
    where = rig(FOUR, THREE)
    many, one = (run("Qwen3-8B", where, objective=name) for name in ("throughput", "latency"))
    assert (many.tensor_parallel, many.stages) == (1, 2)
    assert (one.tensor_parallel, one.stages) == (2, 1)
    assert run("Qwen3-8B", where).places == many.places


@pytest.mark.parametrize(
    ("words", "objective"),
    [
        ("run demo hello", "latency"),
        ("chat demo", "latency"),
        ("run demo hello --objective throughput", "throughput"),
    ],
)
def test_one_user_wants_the_fastest_answer(words: str, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []

    def refuse(config: EngineConfig) -> None:
        configs.append(config)
        raise ConfigError("no engine", code="no-engine")

    monkeypatch.setattr("weft.engine.llm.LLM.from_config", refuse)
    assert weft(*words.split())[0] == 1
    assert [config.objective for config in configs] == [objective]
    assert engine_config(parsed("serve demo")).objective == "throughput"
    assert engine_config(parsed("serve demo --objective latency")).objective == "latency"


def test_uneven_gpus_get_uneven_parts() -> None:
    plan = run("Qwen3-32B", rig(SIX, FOUR))
    heads = [len(place.kv_heads) * len(place.layers) for place in plan.places]
    assert len(heads) == 2 and heads[0] > heads[1]


def test_a_gpu_that_has_to_be_full_is_filled() -> None:
    assert run("Qwen3-14B", rig(FOUR, FOUR)).gpu_memory_utilization == (0.9, 0.9)
    shares = run("Qwen3-32B", rig(SIX, FOUR)).gpu_memory_utilization
    assert max(shares) > 0.9 and min(shares) >= 0.9
    assert run("Qwen3-14B", rig(FOUR, FOUR), gpu_memory_utilization=(0.95,)).gpu_memory_utilization == (0.95, 0.95)


def test_memory_that_others_hold_is_left_to_them(saved: Any) -> None:
    there = rig(FOUR, FOUR)
    used = msgspec.structs.replace(there.gpus[0], free_bytes=14 << 30)
    where = msgspec.structs.replace(there, gpus=(used, there.gpus[1]))
    # Two empty GPUs cut it between them; here one has room for the model, the other has not.
    assert run("Llama-3.1-8B", there).devices == named_devices("cuda:0", "cuda:1")
    own = run("Llama-3.1-8B", where)
    assert own.devices != named_devices("cuda:0")
    file = saved("Llama-3.1-8B", where)
    assert run("Llama-3.1-8B", where, plan=file).places == own.places
    assert min(rank["held_bytes"] for rank in json.loads(Path(file).read_text())["best"]["ranks"]) == 0
    # It was planned beside them: that they are there is no surprise.
    two = saved("Qwen3-8B", where, "-tp", "2", "-dp", "1")
    plan = run("Qwen3-8B", where, plan=two)
    assert plan.devices == named_devices("cuda:1", "cuda:0")  # the first rank, which samples, where there is most room
    assert plan.gpu_memory_utilization == pytest.approx((0.9, 0.9), abs=1e-6)


def test_the_layout_with_all_replicas_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft"):
        plan = run("Llama-3.2-1B", rig(FOUR, FOUR))
    assert plan.devices == named_devices("cuda:0")
    line, steps = [record.getMessage() for record in caplog.records]
    has_values(steps, "max_num_batched_tokens", "4,096")
    has_values(line, "DP 2, bf16", "GPUs 0,1")


@pytest.mark.parametrize(
    ("model", "names", "words"),
    [
        ("Qwen3-14B", [H100, H100], ("-tp", "2")),
        ("Qwen3-14B", [FOUR, THREE], ("-pp", "2")),
        ("Qwen3-0.6B", [FOUR], ("-tp", "1")),
        ("Qwen3-0.6B", [], ("-tp", "2")),
    ],
    ids=str,
)
def test_steps_have_the_tokens_that_weft_plan_tells(
    model: str, names: Sequence[str], words: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user cuts the model, and on a CPU."""
    where = rig(*names)
    flags = {{"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"}[words[0]]: int(words[1])}
    best = told(model, where, monkeypatch, *words, "-dp", "1")["best"]
    assert run(model, where, **flags).max_num_batched_tokens == best["max_num_batched_tokens"]
    said = told(model, where, monkeypatch, *words, "-dp", "1", "--max-num-batched-tokens", "300")["best"]
    own = run(model, where, **flags, max_num_batched_tokens=300)
    assert own.max_num_batched_tokens == said["max_num_batched_tokens"] == 300


@pytest.mark.parametrize("names", [[FOUR], [H100, H100], []], ids=str)
@pytest.mark.parametrize("asked", ONLINE_QUANTIZATIONS)
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Llama-3.1-8B"])
def test_quantised_weights_are_planned_to_the_byte(
    model: str, asked: str, names: Sequence[str], saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of one rank and of two, by the same flag and from the plan's file."""
    for ranks in range(1, max(1, len(names)) + 1):
        words = ("-q", asked, "-tp", str(ranks), "-pp", "1", "-dp", "1")
        best = told(model, rig(*names), monkeypatch, *words)["best"]
        sizes = [rank["weight_bytes"] for rank in best["ranks"]]
        for flags in (
            {"quantization": asked, "tensor_parallel_size": ranks},
            {"plan": saved(model, rig(*names), *words)},
        ):
            plan = run(model, rig(*names), **flags)
            assert [plan.weight_bytes(rank) for rank in range(ranks)] == sizes


def test_int4_is_what_others_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told("Llama-3.1-8B", rig(FOUR), monkeypatch, "--precision", "int4")
    own = told("Llama-3.1-8B", rig(FOUR), monkeypatch, "-q", "int4")
    assert found["model"]["runs"] and own["model"]["runs"]
    (note,) = found["notes"]
    assert found["note_codes"] == ["int4_is_a_checkpoint"]
    assert f"{own['model']['weight_bytes'] / 1e9:.1f} GB" in note
    assert not own["notes"]
    assert found["model"]["weight_bytes"] > own["model"]["weight_bytes"]


def test_a_gpu_that_nobody_knows_gets_short_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft"):
        plan = run("Qwen3-0.6B", host(1), tensor_parallel_size=1)
    assert plan.max_num_batched_tokens == 512
    assert re.search(r"\bmax_num_batched_tokens .*\b512: .*'H'", caplog.text)


def test_device_ids_alone_choose_the_gpus_to_search() -> None:
    where = rig(FOUR, THREE, FOUR, SIX)
    assert run("Qwen3-14B", where, device_ids=(0, 2)).devices == named_devices("cuda:0", "cuda:2")
    assert run("Qwen3-14B", where, device_ids=(3,)).devices == named_devices("cuda:3")
    assert run("Llama-3.1-8B", where, device_ids=(2, 0)).devices == named_devices("cuda:2", "cuda:0")


def test_lengths_stay_the_user_s() -> None:
    plan = run("Qwen3-14B", rig(FOUR, FOUR), max_model_len=4096, max_num_seqs=7)
    assert (plan.max_model_len, plan.max_model_len_given, plan.max_num_seqs) == (4096, True, 7)
    assert not run("Qwen3-14B", rig(FOUR, FOUR)).max_model_len_given
    with refuses(PlanError, "nothing-fits", "32,768"):
        run("Qwen3-32B", rig(SIX, FOUR), max_model_len=32768)


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_split": (2.0, 1.0)},
        {"pipeline_split": (18, 18)},
        {"device": "cpu"},
        {"device_ids": (0, 0), "tensor_parallel_size": 2},
    ],
)
def test_whoever_cuts_decides(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "config_of_best", None)
    there, where = checkpoint("Qwen3-8B"), rig(FOUR, FOUR)
    config = EngineConfig(model="m", **flags)
    plan = plan_to_run(config, there, where)
    assert plan == build_plan(replace(config, max_num_batched_tokens=plan.max_num_batched_tokens), there, where)
    vllm = msgspec.structs.replace(where, environment={"VLLM_PP_LAYER_PARTITION": "18,18"})
    assert plan_to_run(EngineConfig(model="m"), there, vllm).stages == 2


def test_sizes_alone_leave_the_shares_of_unlike_gpus_to_the_search() -> None:
    where = rig(FOUR, SIX)
    two = run("Qwen3-14B", where, tensor_parallel_size=2)
    heads = [len(place.q_heads) for place in two.places]
    assert sum(heads) == 40 and heads[0] != heads[1]
    stages = run("Qwen3-14B", where, pipeline_parallel_size=2)
    layers = [len(place.layers) for place in stages.places]
    assert sum(layers) == 40 and layers[0] != layers[1]
    # What the search finds nothing for is tried all the same: layout has its own say.
    with refuses(PlanError, "weights-exceed-free-memory"):
        run("Llama-3.1-70B", where, tensor_parallel_size=2)


def test_more_ranks_than_unlike_gpus_are_refused_with_the_figures() -> None:
    for sizes in ({"tensor_parallel_size": 4}, {"pipeline_parallel_size": 4}):
        fails(PlanError, "more-ranks-than-gpus", "4 ranks", "2", where=rig(FOUR, THREE), **sizes)


def test_without_gpus_it_is_one_rank_and_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "config_of_best", None)
    assert run("Llama-3.1-8B", rig()).devices == named_devices("cpu")


def test_a_model_that_fits_nowhere_is_told_with_a_way_out() -> None:
    values = ("Llama-3.1-70B", "GB", "RTX 4090", "weft plan", "--tensor-parallel-size")
    with refuses(PlanError, "nothing-fits", *values):
        run("Llama-3.1-70B", rig(FOUR, FOUR))


# --- a plan file ---


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves what weft plan MODEL WORDS --json says on a machine, and returns the file's name."""

    def save(model: str, where: Host, *words: str, **edits: Any) -> str:
        made = told(model, where, monkeypatch, *words)
        file = tmp_path / "plan.json"
        file.write_text(json.dumps({**made, **edits}))
        return str(file)

    return save


def fails(kind: type[WeftError], code: str, *words: str, model: str = "Qwen3-14B", where: Host, **flags: Any) -> None:
    """The error is one line and names all of `words`."""
    with refuses(kind, code) as caught:
        run(model, where, **flags)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


MIXED = [FOUR, THREE]


@pytest.mark.parametrize(("model", "names"), HOSTS, ids=lambda it: it if isinstance(it, str) else "+".join(it))
def test_a_plan_of_this_machine_is_what_runs_without_one(model: str, names: Sequence[str], saved: Any) -> None:
    where = rig(*names)
    own, planned = run(model, where), run(model, where, plan=saved(model, where))
    assert (planned.places, planned.devices, planned.dtype) == (own.places, own.devices, own.dtype)
    assert planned.max_num_batched_tokens == own.max_num_batched_tokens
    assert planned.gpu_memory_utilization == pytest.approx(own.gpu_memory_utilization, abs=1e-6)


def test_a_plan_is_carried_out_however_it_was_made(saved: Any) -> None:
    where = rig(FOUR, FOUR, FOUR, FOUR)
    file = saved("Qwen3-14B", where, "-tp", "2", "-pp", "2", "-dp", "1", "--gpu-memory-utilization", "0.8")
    plan = run("Qwen3-14B", where, plan=file)
    assert (plan.tensor_parallel, plan.stages, len(plan.devices)) == (2, 2, 4)
    assert plan.gpu_memory_utilization == pytest.approx((0.8,) * 4, abs=1e-6)
    split = saved("Qwen3-14B", where, "--tensor-split", "5,3", "--gpus", "1xA6000+1xRTX4090")
    plan = run("Qwen3-14B", rig(SIX, FOUR), plan=split)
    assert [len(place.kv_heads) for place in plan.places] == [5, 3]


def test_lengths_come_from_the_plan_where_they_were_asked_for(saved: Any) -> None:
    where = rig(FOUR, FOUR)
    file = saved("Qwen3-14B", where)
    plan = run("Qwen3-14B", where, plan=file)
    assert not plan.max_model_len_given and plan.max_model_len == plan.shape.max_positions
    assert run("Qwen3-14B", where, plan=file, max_model_len=3000).max_model_len == 3000
    file = saved("Qwen3-14B", where, "--max-model-len", "4096")
    assert run("Qwen3-14B", where, plan=file).max_model_len == 4096
    fails(
        ConfigError,
        "flag-contradicts-plan",
        "max_model_len",
        "3000",
        "4096",
        where=where,
        plan=file,
        max_model_len=3000,
    )


def test_an_fp16_plan_is_computed_in_float16(saved: Any) -> None:
    where = rig(FOUR, FOUR)
    assert run("Qwen3-14B", where, plan=saved("Qwen3-14B", where, "--precision", "fp16")).dtype == "float16"


def test_a_plan_for_a_cpu(saved: Any) -> None:
    plan = run("Llama-3.2-1B", rig(), plan=saved("Llama-3.2-1B", rig(), "-tp", "2"))
    assert plan.devices == named_devices("cpu", "cpu") and plan.quantization == "none"
    # It says the CPU, whatever else is there.
    assert run("Llama-3.2-1B", rig(FOUR), plan=saved("Llama-3.2-1B", rig())).devices == named_devices("cpu")


def test_a_cpu_has_the_kv_cache_that_was_planned(saved: Any) -> None:
    """Whatever share of the memory the engine would take by itself: of one of two replicas, or below a cap."""
    for words in ((), ("-tp", "2"), ("-dp", "2"), ("--max-memory", "cpu=4GB"), ("--pipeline-split", "10,6")):
        file = saved("Llama-3.2-1B", rig(), *words)
        best = json.loads(Path(file).read_text())["best"]
        plan = run("Llama-3.2-1B", rig(), plan=file)
        assert plan.kv_cache_bytes is not None
        most = max(plan.block_bytes(place.rank) for place in plan.places)
        planned = best["kv_tokens"] / best["data_parallel"]
        assert plan.kv_cache_bytes // most * plan.block_size == pytest.approx(planned, abs=plan.block_size)
    assert run("Llama-3.2-1B", rig(), plan=file, kv_cache_memory_bytes=10**9).kv_cache_bytes == 10**9
    full = rig(memory_free_bytes=5 << 30)
    fails(PlanError, "plan-exceeds-host-memory", "plan.json", "5.4 GB", model="Llama-3.2-1B", where=full, plan=file)


def test_an_fp8_cache_is_kept_as_planned(saved: Any) -> None:
    file = saved("Qwen3-14B", rig(FOUR, FOUR), "--kv-cache-dtype", "fp8")
    plain, small = (run("Qwen3-14B", rig(FOUR, FOUR), kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    planned = run("Qwen3-14B", rig(FOUR, FOUR), plan=file)
    assert planned.block_bytes(0) == small.block_bytes(0) == plain.block_bytes(0) // 2


@pytest.mark.parametrize("precision", ["int8", "q8_0"])
def test_weights_are_held_as_planned(saved: Any, precision: str) -> None:
    file = saved("Llama-3.2-1B", rig(), "--precision", precision)
    plan = run("Llama-3.2-1B", rig(), plan=file)
    assert plan.quantization == precision
    planned = json.loads(Path(file).read_text())["best"]["ranks"][0]["weight_bytes"]
    assert plan.weight_bytes(0) == pytest.approx(planned, rel=0.01)
    words = ("quantization", "none", file, precision)
    fails(
        ConfigError, "flag-contradicts-plan", *words, model="Llama-3.2-1B", where=rig(), plan=file, quantization="none"
    )


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ({"tensor_parallel_size": 1}, "flag-contradicts-plan", ["tensor_parallel_size", "1", "2"]),
        ({"pipeline_parallel_size": 2}, "flag-contradicts-plan", ["pipeline_parallel_size", "2", "1"]),
        ({"tensor_split": (3.0, 1.0)}, "flag-contradicts-plan", ["tensor_split", "3,1"]),
        ({"pipeline_split": (20, 20)}, "flag-contradicts-plan", ["pipeline_split", "20,20", "40"]),
        ({"dtype": "float16"}, "flag-contradicts-plan", ["dtype", "float16", "bfloat16"]),
        ({"device": "cpu"}, "flag-contradicts-plan", ["device", "cpu", "cuda"]),
        ({"gpu_memory_utilization": (0.5,)}, "flag-contradicts-plan", ["gpu_memory_utilization", "0.5"]),
        ({"device_ids": (0,)}, "device-ids-not-per-rank", ["device_ids", "1", "2 ranks"]),
        ({"device_ids": (0, 5)}, "plan-beyond-gpus-here", ["GPU 5", "0 to 1"]),
    ],
)
def test_flags_that_contradict_a_plan(saved: Any, flags: dict[str, Any], code: str, words: list[str]) -> None:
    where = rig(FOUR, FOUR)
    fails(WeftError, code, "plan.json", *words, where=where, plan=saved("Qwen3-14B", where), **flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 1, "pipeline_split": (40,)},
        {"tensor_split": (2.0, 2.0)},
        {"dtype": "bfloat16", "device": "cuda"},
        {"gpu_memory_utilization": (0.9,)},
    ],
)
def test_flags_that_say_the_same_as_a_plan(saved: Any, flags: dict[str, Any]) -> None:
    where = rig(FOUR, FOUR)
    file = saved("Qwen3-14B", where)
    assert run("Qwen3-14B", where, plan=file, **flags) == run("Qwen3-14B", where, plan=file)


def test_device_ids_carry_a_plan_to_other_gpus_of_the_kind(saved: Any) -> None:
    file = saved("Qwen3-14B", rig(FOUR, FOUR))
    where = rig(THREE, FOUR, FOUR)
    fails(PlanError, "plan-for-other-gpu", "RTX 4090", "GPU 0", "RTX 3090", "--device-ids", where=where, plan=file)
    assert run("Qwen3-14B", where, plan=file, device_ids=(2, 1)).devices == named_devices("cuda:2", "cuda:1")


def test_a_machine_that_is_not_the_planned_one(saved: Any) -> None:
    file = saved("Qwen3-14B", rig(FOUR, FOUR))
    fails(PlanError, "plan-beyond-gpus-here", "GPU 1", "0 to 0", where=rig(FOUR), plan=file)
    fails(PlanError, "plan-without-gpu-here", "RTX 4090", "here", where=rig(), plan=file)
    there = rig(FOUR, FOUR)
    small = msgspec.structs.replace(there.gpus[1], total_bytes=20 << 30, free_bytes=20 << 30)
    fails(
        *(PlanError, "plan-gpu-smaller-here", "25.8 GB of GPU 1", "21.5 GB"),
        where=msgspec.structs.replace(there, gpus=(there.gpus[0], small)),
        plan=file,
    )
    used = msgspec.structs.replace(there.gpus[1], free_bytes=10 << 30, holders=(Holder(77, "/bin/game", 14 << 30),))
    fails(
        *(PlanError, "plan-gpu-in-use", "23.2 GB of GPU 1", "game (pid 77) 15.0 GB", "--gpu-memory-utilization"),
        where=msgspec.structs.replace(there, gpus=(there.gpus[0], used)),
        plan=file,
    )


def test_another_model_is_refused(saved: Any) -> None:
    where = rig(FOUR, FOUR)
    words = ("Qwen/Qwen3-14B", "14,768,307,200", "Llama-3.1-8B")
    fails(PlanError, "plan-for-other-model", *words, where=where, model="Llama-3.1-8B", plan=saved("Qwen3-14B", where))


def test_a_plan_that_weft_does_not_run_is_refused(saved: Any) -> None:
    where = rig(FOUR, FOUR)
    fails(
        PlanError,
        "plan-precision-not-converted",
        "int4",
        "--precision bf16",
        where=where,
        plan=saved("Qwen3-14B", where, "--precision", "int4"),
    )
    several = saved("Qwen3-14B", where, "--nodes", "2x1xRTX4090", "-pp", "2", "-tp", "1")
    fails(PlanError, "plan-replica-on-several-machines", "--gpus", where=where, plan=several)


# A file, the code of what is wrong with it, and values of the message.
NO_PLANS: list[tuple[str, str, list[str]]] = [
    ("", "plan-not-json", []),
    ("{", "plan-not-json", []),
    ("[]", "not-a-plan", []),
    ('{"a": 1}', "not-a-plan", ["`format`"]),
    ('{"format": 1, "engine": "weft", "best": {}}', "damaged-plan", []),
    ('{"format": 99, "engine": "weft", "best": {}}', "plan-of-other-format", ["99", "1 to 2"]),
    ('{"format": 0, "engine": "weft", "best": {}}', "plan-of-other-format", ["0", "1 to 2"]),
    ('{"format": 3, "engine": "weft", "best": {}}', "plan-of-other-format", ["3", "1 to 2"]),
    ('{"format": "x", "engine": "weft", "best": {}}', "not-a-plan", []),
    ("\xff", "plan-not-json", []),
]


@pytest.mark.parametrize(("text", "code", "words"), NO_PLANS)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str, code: str, words: list[str]) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(text.encode("latin-1"))
    fails(ConfigError, code, str(file), *words, where=rig(FOUR), plan=str(file))


def test_the_wording_of_files_that_are_no_plans(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    def read(text: str) -> None:
        (tmp_path / "p.json").write_bytes(text.encode("latin-1"))
        plan_file.load_plan_file(str(tmp_path / "p.json"))

    golden("plan_file.txt", refusals(read, [text for text, *_ in NO_PLANS], tmp_path))


# --- formats ---

FORMAT_1 = Path(__file__).parents[2] / "data/plan-format-1.json"


def test_a_plan_of_format_1_is_read() -> None:
    """Its ranks have the number of a GPU among those of all nodes; the node's own number follows."""
    read = plan_file.load_plan_file(str(FORMAT_1))
    assert [rank.device for rank in read.layout.ranks] == [
        *named_devices("cuda:0", "cuda:1"),
        *named_devices("cuda:0", "cuda:1", node=1),
    ]
    plan = run("Qwen3-14B", rig(FOUR, FOUR), plan=str(FORMAT_1))
    assert plan.devices == named_devices("cuda:0", "cuda:1")


def test_a_plan_of_format_1_on_a_cpu(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(saved("Llama-3.2-1B", rig(), "-tp", "2"))
    plan = json.loads(file.read_text())
    ranks = [{name: value for name, value in rank.items() if name != "device"} for rank in plan["best"]["ranks"]]
    file.write_text(json.dumps({**plan, "format": 1, "best": {**plan["best"], "ranks": ranks}}))
    assert [rank.device for rank in plan_file.load_plan_file(str(file)).ranks] == [*named_devices("cpu", "cpu")]


@pytest.mark.parametrize("field", ["node", "kind", "index"])
def test_a_device_that_lacks_a_field(saved: Any, field: str) -> None:
    where = rig(FOUR, FOUR)
    best = json.loads(Path(saved("Qwen3-14B", where)).read_text())["best"]
    del best["ranks"][1]["device"][field]
    damaged = saved("Qwen3-14B", where, best=best)
    with refuses(ConfigError, "damaged-plan") as raised:
        plan_file.load_plan_file(damaged)
    assert field in str(raised.value) and "ranks[1].device" in str(raised.value) and damaged in str(raised.value)


@pytest.mark.parametrize("damage", ["gpu_index", "node", "gpu"])
def test_a_damaged_plan_of_format_1(tmp_path: Path, damage: str) -> None:
    plan = json.loads(FORMAT_1.read_text())
    plan["best"]["ranks"][0][damage] = 99
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    if damage == "gpu_index":
        fails(PlanError, "plan-beyond-gpus-here", "GPU 99", where=rig(FOUR, FOUR), plan=str(file))
        return
    with refuses(ConfigError, "damaged-plan"):
        plan_file.load_plan_file(str(file))


def test_a_plan_of_a_format_to_come(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**json.loads(FORMAT_1.read_text()), "format": 3}))
    with refuses(ConfigError, "plan-of-other-format"):
        plan_file.load_plan_file(str(file))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    make = "weft plan MODEL --json"
    fails(ConfigError, "cannot-read-plan", "No such file", make, where=rig(FOUR), plan=str(tmp_path / "none"))
    fails(ConfigError, "cannot-read-plan", "directory", make, where=rig(FOUR), plan=str(tmp_path))


def test_a_damaged_plan(saved: Any) -> None:
    where = rig(FOUR, FOUR)
    best = json.loads(Path(saved("Qwen3-14B", where)).read_text())["best"]
    fails(
        ConfigError,
        "plan-ranks-differ",
        "1",
        where=where,
        plan=saved("Qwen3-14B", where, best={**best, "ranks": best["ranks"][:1]}),
    )
    none = saved("Qwen3-14B", where, best={**best, "tensor_parallel": 0})
    fails(ConfigError, "plan-ranks-differ", "0", where=where, plan=none)
    wrong = saved("Qwen3-14B", where, best={**best, "tensor_parallel": "two"})
    fails(ConfigError, "damaged-plan", "$.best.tensor_parallel", where=where, plan=wrong)
    moved = [{**rank, "first_layer": rank["first_layer"] + 1} for rank in best["ranks"]]
    fails(
        PlanError,
        "plan-spans-differ",
        "rank 0",
        "1-40",
        "0-39",
        where=where,
        plan=saved("Qwen3-14B", where, best={**best, "ranks": moved}),
    )
    named = [{**rank, "gpu": "X"} for rank in best["ranks"]]
    fails(
        ConfigError, "plan-gpu-unknown", "X", where=where, plan=saved("Qwen3-14B", where, best={**best, "ranks": named})
    )
    layers = saved("Qwen3-14B", where, best={**best, "pipeline_split": [39]})
    fails(PlanError, "pipeline-split-of-other-sum", "39", "40", where=where, plan=layers)
    fails(
        ConfigError,
        "plan-for-other-engine",
        "vllm",
        "--engine",
        where=where,
        plan=saved("Qwen3-14B", where, engine="vllm"),
    )
    fails(ConfigError, "plan-without-layout", "weft plan", where=where, plan=saved("Qwen3-14B", where, best=None))


# --- the flag ---


def test_a_plan_names_its_model(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cli.flags.flags import engine_config

    file = saved("Qwen3-14B", rig(FOUR, FOUR))
    for words in (["serve"], ["run", "--prompt", "x"], ["chat"], ["bench", "latency"], ["bench", "throughput"]):
        config = engine_config(parsed([*words, "--plan", file]))
        assert (config.model, config.plan) == ("Qwen/Qwen3-14B", file)


def test_python_takes_a_path() -> None:
    from weft.engine.client.arguments import engine_config

    assert engine_config("m", {"plan": Path("plan.json")}) == EngineConfig(model="m", plan="plan.json")
    assert engine_config("m", {"plan": None}).plan is None


def test_a_plan_may_be_limited_but_not_twice(saved: Any) -> None:
    where = rig(FOUR, FOUR)
    file = saved("Qwen3-14B", where, "--max-memory", "0=20GB,1=20GB")
    plan = run("Qwen3-14B", where, plan=file)
    assert plan.gpu_memory_utilization == pytest.approx((20e9 / (24564 << 20),) * 2, abs=1e-6)
    fails(
        ConfigError,
        "plan-beside-max-memory",
        "--max-memory",
        "--plan",
        where=where,
        plan=file,
        max_memory={0: "10GB", 1: "10GB"},
    )
    fails(ConfigError, "plan-beside-device-map", "--device-map", "--plan", where=where, plan=file, device_map="auto")


def test_a_bad_plan_is_one_line(tmp_path: Path) -> None:
    refused_line(["serve", "--plan", str(tmp_path / "none")], 1, "cannot-read-plan", str(tmp_path / "none"))
    assert plan_file.FORMAT == 2
