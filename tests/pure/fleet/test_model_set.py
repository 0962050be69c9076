"""Files of several models: their values, their refusals, and the plan of a set."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal_line, refuses
from weft.checkpoint import lookup
from weft.checkpoint.architectures.model import Model
from weft.cli.commands import COMMANDS
from weft.cli.dispatch import dispatch
from weft.cli.flags.flags import serve_options
from weft.cli.parser import UsageError, parse_command
from weft.cli.plan.model_set import plan_text
from weft.cli.serve import set_file
from weft.cli.serve.serve import main as serve
from weft.cli.serve.serve import ollama_address
from weft.errors import ConfigError, PlanError, WeftError
from weft.fleet.hosting.model_set import ModelEntry, ModelSet
from weft.fleet.hosting.residency import State
from weft.fleet.hosting.set_plan import SetPlan, plan_set
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus
from weft.machine.hardware.gpus import GpuSpec

TWO = {"models": [{"name": "small", "model": "Qwen/Qwen3-8B"}, {"name": "other", "model": "Qwen/Qwen3-4B"}]}


def written(folder: Path, content: Any) -> str:
    path = folder / "set.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def read(folder: Path, content: Any) -> ModelSet:
    models = set_file.read_model_set(written(folder, content))
    assert models is not None
    return models


def test_a_list_of_models(tmp_path: Path) -> None:
    models = read(
        tmp_path,
        """
        port: 9000
        max-model-len: 4096
        models:
          - name: [small, small:8b]
            model: Qwen/Qwen3-8B
            device_ids: 0,1
            keep-alive: 5m
            priority: 3
            max_model_len: 8192
            tool-call-parser: hermes
          - {model: demo, load: demand}
        """,
    )
    small, demo = models.entries
    assert small.names == ("small", "small:8b")
    assert (small.config.model, small.config.device_ids, small.config.max_model_len) == ("Qwen/Qwen3-8B", (0, 1), 8192)
    assert (small.keep_alive_s, small.priority, small.must_be_awake, small.always) == (300.0, 3, False, True)
    assert "--tool-call-parser=hermes" in small.flags
    assert (demo.names, demo.config.max_model_len, demo.always) == (("demo",), 4096, False)
    assert demo.must_be_awake
    assert models.find("small:8b") is small
    assert models.find("demo:latest") is demo
    assert models.find("large") is None


def test_flags_of_the_address_stay_flags(tmp_path: Path) -> None:
    path = written(tmp_path, {**TWO, "port": 9000, "max-model-len": 4096, "api-key": ["k"]})
    options = serve_options(parse_command(COMMANDS["serve"], ["--config", path]), {})
    assert (options.port, options.api_key) == (9000, ("k",))


def test_any_other_file_is_flags(tmp_path: Path) -> None:
    path = written(tmp_path, {"max-model-len": 4096})
    assert set_file.read_model_set(path) is None
    assert parse_command(COMMANDS["serve"], ["demo", "--config", path]).engine.scheduling.max_model_len == 4096


def test_the_book_of_infernet(tmp_path: Path) -> None:
    book = {
        "backend": "vllm",
        "vllm_instances": [
            {"host": "http://localhost:8000", "model": "qwen2.5:14b"},
            {"host": "http://localhost:8001", "model": "llama3.1:8b"},
        ],
        "served_models": ["qwen2.5:14b", "llama3.1:8b"],
    }
    models = read(tmp_path, book)
    assert [entry.names for entry in models.entries] == [
        ("qwen2.5:14b", "Qwen/Qwen2.5-14B-Instruct"),
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B-Instruct"),
    ]
    assert models.port == 8000
    assert any("8001" in warning for warning in models.warnings)
    assert all(math.isinf(entry.keep_alive_s) for entry in models.entries)
    named = read(tmp_path, {"served_models": ["llama3.1:8b"]})
    assert named.entries[0].config.model == "meta-llama/Llama-3.1-8B-Instruct"


WRONG: tuple[tuple[str, Any], ...] = (
    ("models-not-list", {"models": {"name": "a"}}),
    ("no-models", {"models": []}),
    ("model-not-mapping", {"models": ["demo"]}),
    ("model-missing", {"models": [{"name": "a"}]}),
    ("duplicate-model-name", {"models": [{"name": "a", "model": "x"}, {"name": ["b", "a:latest"], "model": "y"}]}),
    ("device-twice", {"models": [{"name": "a", "model": "x", "device-ids": "0,1,0"}]}),
    ("unknown-field", {"models": [{"name": "a", "model": "x", "keepalive": "5m"}]}),
    ("unknown-field", {"models": [{"name": "a", "model": "x", "max-modell-len": 5}]}),
    ("address-flag-of-model", {"models": [{"name": "a", "model": "x", "port": 8001}]}),
    ("invalid-keep-alive", {"models": [{"name": "a", "model": "x", "keep-alive": "soon"}]}),
    ("invalid-priority", {"models": [{"name": "a", "model": "x", "priority": "high"}]}),
    ("invalid-load", {"models": [{"name": "a", "model": "x", "load": "never"}]}),
    ("invalid-model-name", {"models": [{"name": [], "model": "x"}]}),
    ("invalid-flag-value", {"models": [{"name": "a", "model": "x", "max-model-len": "long"}]}),
    ("infernet-instances-not-objects", {"vllm_instances": [{"host": "http://localhost:8000"}]}),
)


def test_the_words_of_wrong_sets(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """The file; below it the code and the message."""
    lines = []
    for code, content in WRONG:
        with pytest.raises(WeftError) as raised:
            read(tmp_path, content)
        assert raised.value.code == code, raised.value
        lines += [json.dumps(content), "  " + refusal_line(raised.value, tmp_path).rstrip()]
    golden("errors/model_set.txt", "\n".join(lines) + "\n")


def test_flags_beside_a_set(tmp_path: Path) -> None:
    path = written(tmp_path, TWO)
    with refuses(UsageError, "engine-flag-beside-set", "--max-model-len"):
        serve(parse_command(COMMANDS["serve"], ["--config", path, "--max-model-len", "99"]))
    with refuses(UsageError, "model-beside-set", "'demo'"):
        serve(parse_command(COMMANDS["serve"], ["demo", "--config", path]))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0", ("0.0.0.0", 11434)),
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        (":9000", ("127.0.0.1", 9000)),
        ("http://10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_ollama_host(text: str, address: tuple[str, int]) -> None:
    assert ollama_address(text) == address


def test_an_ollama_host_that_is_none() -> None:
    with refuses(UsageError, "invalid-ollama-host", "a:b"):
        ollama_address("a:b")


# Plans


def look_up(entry: ModelEntry) -> Model:
    return lookup.look_up(entry.config.model)


def planned(folder: Path, gpus: str, *rows: dict[str, Any], host_bytes: int | None = None) -> SetPlan:
    return plan_set(read(folder, {"models": list(rows)}), parse_gpus(gpus), look_up, host_bytes)


def test_each_model_gets_gpus_of_its_own(tmp_path: Path) -> None:
    rows = [{"name": name, "model": "Qwen/Qwen3-8B", "max-model-len": 8192} for name in ("a", "b")]
    plan = planned(tmp_path, "4xRTX4090", *rows, {"name": "c", "model": "Qwen/Qwen3-14B", "max-model-len": 8192})
    assert [model.devices for model in plan.models] == [("cuda:0",), ("cuda:1",), ("cuda:2", "cuda:3")]
    for model in plan.models:
        for device, size in model.need.awake.items():
            assert model.weight_bytes / len(model.devices) < size <= plan.rooms[device]
        assert sum(model.need.asleep[device] for device in model.devices) < model.weight_bytes / 2
        assert model.need.asleep["cpu"] == model.weight_bytes
        assert "--device-ids=" + ",".join(device[-1] for device in model.devices) in model.argv


def test_models_that_must_be_awake_have_to_fit_together(tmp_path: Path) -> None:
    rows = [{"name": name, "model": "Qwen/Qwen3-8B", "max-model-len": 8192, "device-ids": [0]} for name in ("a", "b")]
    with refuses(PlanError, "set-does-not-fit", "cuda:0", "bytes", "'a'", "bytes", "'b'", "bytes"):
        planned(tmp_path, "1xRTX4090", *rows)
    with refuses(PlanError, "set-does-not-fit", "'b'", "cuda:0"):
        planned(tmp_path, "1xRTX4090", rows[0], {**rows[1], "keep-alive": "5m"})
    plan = planned(tmp_path, "1xRTX4090", *({**row, "keep-alive": "5m"} for row in rows))
    assert [model.devices for model in plan.models] == [("cuda:0",)] * 2
    assert all(0 < model.wake_s < 2 for model in plan.models), "8B over PCIe"


@pytest.mark.parametrize("host_bytes", [None, 40 << 30, 10 << 30])
def test_a_host_with_too_little_memory_for_weights_asleep(tmp_path: Path, host_bytes: int | None) -> None:
    rows = [{"name": name, "model": "Qwen/Qwen3-8B", "max-model-len": 8192, "device-ids": [0]} for name in ("a", "b")]
    plan = planned(tmp_path, "1xRTX4090", *({**row, "keep-alive": "5m"} for row in rows), host_bytes=host_bytes)
    sleeps = host_bytes != 10 << 30
    assert [model.entry.name for model in plan.sleepless] == ([] if sleeps else ["a", "b"])
    assert all((row["wake_s"] is not None) == sleeps for row in plan.as_json()["models"])
    text = plan_text(read(tmp_path, {"models": rows}), plan)
    assert ("16.4 GB of the host's memory" in text) == ("does not sleep" in text) == (not sleeps)
    residency = plan.residency()
    residency.tenants["a"].state = State.AWAKE
    assert residency.may_sleep("a") == sleeps or host_bytes is None


def test_a_wake_up_of_8b_by_arithmetic(tmp_path: Path) -> None:
    """Half a second at most over PCIe 5 in 16 bits, and over PCIe 4 in 8."""
    row = {"name": "a", "model": "Qwen/Qwen3-8B", "max-model-len": 8192, "keep-alive": "5m"}
    for gpus, more in (("1xH200", {}), ("1xH100", {}), ("1xRTX5090", {}), ("1xRTX4090", {"quantization": "int8"})):
        assert planned(tmp_path, gpus, {**row, **more}).models[0].wake_s <= 0.5, gpus


def test_on_a_cpu_a_model_that_sleeps_keeps_its_weights(tmp_path: Path) -> None:
    cpu = GpuSpec(
        name="a CPU",
        memory_bytes=24 << 30,
        bandwidth_Bps=4e10,
        flops={"bf16": 1e12, "fp16": 1e12, "fp32": 1e12},
        nvlink_Bps=0,
        pcie_Bps=0,
        capability=(0, 0),
        source="made up",
        kind="cpu",
    )
    rows = [{"name": name, "model": "Qwen/Qwen3-4B", "max-model-len": 4096, "keep-alive": "5m"} for name in ("a", "b")]
    models = read(tmp_path, {"models": rows})
    plan = plan_set(models, Cluster((Node((cpu,), "memory"),), 1e9), look_up)
    for model in plan.models:
        assert model.weight_bytes <= model.need.asleep["cpu"] < model.need.awake["cpu"] - 0.9 * model.kv_bytes
    residency = plan.residency()
    residency.tenants["a"].state = State.AWAKE
    room = residency.decide_placement("b", 1.0)
    assert room.ready or room.sleepers == ("a",), "its KV cache is room enough"


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    with refuses(PlanError, "model-does-not-fit", "'a'", "Qwen/Qwen3-32B", "cuda:0"):
        planned(tmp_path, "1xRTX4090", {"name": "a", "model": "Qwen/Qwen3-32B"})
    path = written(tmp_path, {"models": [{"name": "a", "model": "Qwen/Qwen3-32B"}]})
    assert dispatch(["plan", "--config", path, "--gpus", "1xRTX4090"]) == 3, "as of one model"
    half = {"name": "a", "model": "Qwen/Qwen3-8B", "gpu-memory-utilization": 0.45}
    with refuses(PlanError, "model-does-not-fit", "'a'", "cuda:0", "0.45", "raise gpu-memory-utilization"):
        planned(tmp_path, "1xRTX4090", half)


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    with refuses(ConfigError, "device-ids-beyond-gpus", "'a'", "1", "0 to 0"):
        planned(tmp_path, "1xRTX4090", {"name": "a", "model": "Qwen/Qwen3-8B", "device-ids": 1})


def test_weft_plan_of_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"port": 9000, "models": [{"name": "a", "model": "Qwen/Qwen3-8B", "max-model-len": 8192}]})
    assert dispatch(["plan", "--config", path, "--gpus", "1xRTX4090", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (row,) = plan["models"]
    assert row["names"] == ["a"]
    assert row["must_be_awake"]
    assert row["awake_bytes"]["cuda:0"] <= plan["rooms"]["cuda:0"]
    assert dispatch(["plan", "--config", path, "--gpus", "1xRTX4090"]) == 0
    text = capsys.readouterr().out
    assert "always" in text
    assert "cuda:0" in text
    assert dispatch(["plan", "--config", path, "--precision", "int4"]) == 2
    assert "--precision" in capsys.readouterr().err
