"""Layers on a CPU beside GPUs: plans that ask for them, their speed and memory, and the engine's own plan of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.commands import weft, weft_json
from tests.pure.machines import FOUR, MEASURED, T4, checkpoint, rig
from tests.pure.study.test_export_gaps import exported_gaps
from tests.refusals import refuses
from weft.checkpoint.architectures.published import PublishedQuantization
from weft.config import EngineConfig
from weft.engine.client.vllm import vllm_arguments
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.cpus import typical_cpu
from weft.machine.hardware.hardware_file import read_hardware_file
from weft.machine.hardware.host import Host
from weft.plan.plan import Plan, named_devices
from weft.planner.execution.execution import plan_to_run
from weft.planner.execution.forecast import forecast_plan

GB = 10**9
LLAMA = "Llama-3.1-8B"
WORDS = ["plan", LLAMA, "--gpus", "2xRTX4090", "--concurrency", "1"]
SMALL = ["--max-memory", "0=8GB,1=8GB"]  # not enough for the 16 GB of the model
FIRST = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "": 0}


def devices(best: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["device"]["kind"], row["device"]["index"]) for row in best["ranks"]]


def test_the_rest_goes_to_the_cpu_if_it_is_asked_for() -> None:
    status, report = weft_json(*WORDS, *SMALL)
    assert status == 3 and report["best"] is None  # never unasked
    status, report = weft_json(*WORDS, SMALL[0], SMALL[1] + ",cpu=64GB")
    best = report["best"]
    assert status == 0 and devices(best) == [("cpu", 0), ("cuda", 0), ("cuda", 1)]
    assert best["pipeline_split"][0] == best["ranks"][0]["layers"]
    assert all(row["weight_bytes"] + row["kv_bytes"] + row["other_bytes"] <= 8 * GB for row in best["ranks"][1:])
    assert "layers_on_cpu" in report["note_codes"] and "max_memory_without_effect" not in report["note_codes"]
    # As few layers as leave the GPUs full: one more on each would not fit.
    layer = best["ranks"][1]["weight_bytes"] / best["ranks"][1]["layers"]
    assert all(row["usable_bytes"] + layer > 8 * GB for row in best["ranks"][1:])
    # A token waits for the CPU's memory at least.
    rest = best["ranks"][0]["weight_bytes"] - 128256 * 4096 * 2  # without the embedding
    assert 1 / best["predicted"]["single_tok_s"] > rest / typical_cpu().bandwidth_Bps


def test_what_fits_the_gpus_stays_there() -> None:
    _, plain = weft_json(*WORDS)
    status, report = weft_json(*WORDS, "--max-memory", "0=24GB,1=24GB,cpu=64GB")
    assert status == 0 and {kind for kind, _ in devices(report["best"])} == {"cuda"}
    assert report["best"]["name"] == plain["best"]["name"]
    assert "max_memory_without_effect" in report["note_codes"]


def test_a_map_is_planned_as_it_is() -> None:
    words = [*WORDS, "--device-map", json.dumps(FIRST)]
    status, report = weft_json(*words)
    assert status == 0 and devices(report["best"]) == [("cpu", 0), ("cuda", 0)]
    assert report["best"]["pipeline_split"] == [2, 30]
    status, text, _ = weft(*words)
    assert status == 0 and re.search(r"\bCPU .*\b1 of 2 GPUs", text) and "274.9 GB" in text
    assert re.search(r"\b0 to 1 \(1\.9 GB\) .*\bCPU", text)
    _, alone = weft_json(*WORDS, "--device-map", "0")
    assert report["best"]["predicted"]["single_tok_s"] < alone["best"]["predicted"]["single_tok_s"]
    status, text, error = weft(*words, "--emit", "compose")
    assert status == 0 and "replica-0" in text
    device_map = json.dumps(FIRST, separators=(",", ":"))
    gaps = exported_gaps(" ".join(["compose", *WORDS[1:], "--device-map", device_map]))
    assert [gap.code for gap in gaps] == ["plan_replaced"] and str(gaps[0]) in error
    status, report = weft_json(*words, "--engine", "vllm")
    assert status == 3 and report["rejected"][0]["code"] == "engine_not_beside_cpu"


def test_the_cpu_of_a_hardware_file(tmp_path: Path) -> None:
    file = tmp_path / "rig.yaml"
    gpus = (
        "nodes: [{gpus: [{name: RTX 4090}], cpu: {name: slow, memory: 64GB, bandwidth: 10GB/s, tflops: {fp32: 0.5}}%s}]"
    )
    file.write_text(gpus % "")
    cluster = read_hardware_file(str(file))
    assert cluster.cpu is not None and not cluster.on_cpu and [gpu.kind for gpu in cluster.gpus] == ["gpu"]
    words = ["plan", LLAMA, "--gpus", str(file)]
    _, report = weft_json(*words)
    assert {kind for kind, _ in devices(report["best"])} == {"cuda"}
    _, report = weft_json(*words, "--device-map", json.dumps(FIRST))
    assert report["best"]["ranks"][0]["gpu"] == "slow" and report["hardware"]["types"]["slow"]["kind"] == "cpu"
    assert 1 / report["best"]["predicted"]["single_tok_s"] > 0.08  # two layers of 0.44 GB at 10 GB/s
    status, _, error = weft("plan", LLAMA, "--nodes", "2x1xRTX4090", "--max-memory", "0=8GB,1=8GB,cpu=64GB")
    assert status != 0 and "2 nodes" in error


def planned(host: Host, **flags: Any) -> Plan:
    name = "Llama-3.2-1B"
    return plan_to_run(EngineConfig(model=name, load_format="dummy", **flags), checkpoint(name), host)


def test_the_plan_of_an_engine() -> None:
    host = rig(FOUR, FOUR)
    plan = planned(host, device_map=FIRST, max_memory={0: "20GB", 1: "20GB", "cpu": "8GB"})
    assert plan.devices == named_devices("cpu", "cuda:0")
    assert plan.uses_cpu and not plan.on_cpu and not plan.exclusive_gpus
    assert plan.uuids == ("", "GPU-0") and plan.max_memory == {"cpu": 8 * GB, "cuda:0": 20 * GB, "cuda:1": 20 * GB}
    assert plan.cores == (host.cores[:-1], host.cores[-1:])  # a rank on a GPU needs one
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    forecast = forecast_plan(plan, host, MEASURED)
    assert forecast.weight_bytes == plan.weight_bytes(0) + plan.weight_bytes(1)
    assert [rank.gpu for rank in forecast.memory.ranks][1] == "RTX 4090"
    slower = planned(host, device_map={**FIRST, "model.layers.2": "cpu"})
    assert forecast.speed(100, 100).single_tok_s > forecast_plan(slower, host, MEASURED).speed(100, 100).single_tok_s
    named = planned(host, device_ids=(0, "cpu", 1), pipeline_parallel_size=3, attention_backend="triton")
    assert named.devices == named_devices("cuda:0", "cpu", "cuda:1")
    assert [named.rank_backend(rank) for rank in range(3)] == ["triton", "auto", "triton"]


def test_an_engine_takes_the_cpu_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.probes.stored_speeds.cpu_speed_of", lambda *_: MEASURED.cpu)
    host, caps = rig(FOUR), {0: "3500MB"}
    with refuses(PlanError, "nothing-fits"):
        planned(host, max_memory=caps)
    plan = planned(host, max_memory={**caps, "cpu": "30GB"})
    assert plan.devices == named_devices("cpu", "cuda:0") and plan.max_memory == {
        "cpu": 30 * GB,
        "cuda:0": 3500 * 10**6,
    }
    assert planned(host, max_memory={0: "20GB", "cpu": "30GB"}).devices == named_devices("cuda:0")


def test_published_weights_stay_quantised_beside_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ checkpoints say float16, in which the CPU kernels do not multiply them."""
    monkeypatch.setattr("weft.probes.stored_speeds.cpu_speed_of", lambda *_: MEASURED.cpu)
    gptq = PublishedQuantization(method="gptq", bits=4, group=128, symmetric=True)
    stored = checkpoint(LLAMA)
    shape = msgspec.structs.replace(stored.shape, dtype="float16", published=gptq)
    parts = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(len(shape.layers)) for part in parts]
    stored = msgspec.structs.replace(stored, shape=shape, quantised=dict.fromkeys(names, gptq.scheme))

    def plan_on(host: Host, **flags: Any) -> Plan:
        return plan_to_run(EngineConfig(model=LLAMA, load_format="dummy", **flags), stored, host)

    assert plan_on(rig(FOUR)).dtype == "float16"
    for flags in ({"device_map": FIRST}, {"max_memory": {0: "6GB", "cpu": "30GB"}}):
        plan = plan_on(rig(FOUR), **flags)
        assert plan.uses_cpu and plan.dtype == "bfloat16" and plan.schemes
    with refuses(ConfigError, "gpu-without-bfloat16", "Tesla T4"):
        plan_on(rig(T4), device_map=FIRST)


def test_a_plan_file_with_the_cpu(tmp_path: Path) -> None:
    words = ["plan", "Llama-3.2-1B", "--gpus", "1xRTX4090", "--device-map", json.dumps(FIRST), "--json"]
    status, text, _ = weft(*words)
    assert status == 0
    (tmp_path / "plan.json").write_text(text)
    plan = planned(rig(FOUR), plan=str(tmp_path / "plan.json"))
    assert plan.devices == named_devices("cpu", "cuda:0") and len(plan.places[0].layers) == 2
    with refuses(ConfigError, "device-ids-of-other-kind", "rank 0", 0):
        planned(rig(FOUR, FOUR), plan=str(tmp_path / "plan.json"), device_ids=(0, 1))


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"device_ids": (0, "cpu"), "tensor_parallel_size": 2}, "cpu-beside-other-cut"),
        (
            {"device_ids": (0, 0, "cpu", "cpu"), "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "cpu-beside-other-cut",
        ),
        ({"device_map": FIRST, "kv_cache_dtype": "fp8"}, "kv-cache-dtype-not-supported"),
        ({"device_ids": ("cpu", "cpu"), "pipeline_parallel_size": 2, "device": "cpu"}, "device-ids-on-cpu"),
    ],
    ids=str,
)
def test_what_a_cpu_beside_gpus_does_not_do(flags: dict[str, Any], code: str) -> None:
    with refuses(ConfigError, code):
        planned(rig(FOUR, FOUR), **flags)


def test_other_engines_flag_leads_here() -> None:
    answer = vllm_arguments()["cpu-offload-gb"]
    assert not answer.refused and "--max-memory" in answer.warning and "--device-map" in answer.warning
