"""Scripts of weft plan --emit: bash reads them, and the programs get the flags that they know."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pure.commands import parsed
from tests.pure.exports import SWITCHES, VLLM, emit, flags, parts, plans, run
from tests.pure.study.test_export_gaps import exported_gaps
from tests.refusals import has_values
from weft.cli.flags.flags import engine_config, serve_options

RAY_START = {"head", "port", "node-ip-address", "num-gpus", "address", "block"}


SCRIPTS = [
    pytest.param(target, plan, id=f"{target}-{plan}")
    for target in ("weft", "vllm", "ollama", "infernet")
    for plan in plans(target)
]


@pytest.mark.parametrize(("target", "plan"), SCRIPTS)
def test_bash_reads_every_script(target: str, plan: str, tmp_path: Path) -> None:
    for name, written in parts(target, plan).items():
        if name.endswith(".sh") or written.startswith("#!/usr/bin/env bash"):
            subprocess.run(["bash", "-n"], input=written, text=True, check=True)


@pytest.mark.parametrize("plan", plans("vllm"))
def test_vllm_knows_the_flags(plan: str, tmp_path: Path) -> None:
    for written in parts("vllm", plan).values():
        status, calls, err = run(
            written, tmp_path, MODEL="a/b", NODE0_ADDRESS="h", NODE1_ADDRESS="i", NETWORK_INTERFACE="e"
        )
        assert status == 0 and err == "" and calls
        for call in calls:
            program, verb, *words = call["words"]
            known = VLLM if program == "vllm" else RAY_START
            assert verb == ("serve" if program == "vllm" else "start")
            assert flags(words).keys() <= known
            assert all(values for name, values in flags(words).items() if name not in SWITCHES and program == "vllm")


def test_a_script_stops_where_a_placeholder_is_not_set(tmp_path: Path) -> None:
    written = parts("vllm", "replicas-int4")["vllm"]
    status, calls, err = run(written, tmp_path)
    assert status and not calls
    has_values(err, "MODEL", "AWQ", "GPTQ", "4-bit", "Qwen/Qwen2.5-32B-Instruct")
    head = parts("vllm", "two-nodes")["node-0.sh"]
    assert run(head, tmp_path)[0] and "NODE0_ADDRESS: " in run(head, tmp_path)[2]


def test_vllm_replicas(tmp_path: Path) -> None:
    status, calls, _ = run(parts("vllm", "replicas-int4")["vllm"], tmp_path, MODEL="it's/one")
    assert status == 0 and [call["words"][:3] for call in calls] == [["vllm", "serve", "it's/one"]] * 2
    seen = [call["environment"] for call in calls]
    assert [it["CUDA_VISIBLE_DEVICES"] for it in seen] == ["0,1", "2,3"]
    assert {it["VLLM_PP_LAYER_PARTITION"] for it in seen} == {"32,32"}
    assert {it["CUDA_DEVICE_ORDER"] for it in seen} == {"PCI_BUS_ID"}
    said = [flags(call["words"]) for call in calls]
    assert [it["port"] for it in said] == [["8000"], ["8001"]]
    # The method is in the checkpoint; awq by name would keep the slower kernel.
    assert "quantization" not in said[0] and "dtype" not in said[0]


def test_a_server_that_fails_is_told(tmp_path: Path) -> None:
    script = parts("vllm", "replicas-int4")["vllm"]
    status, calls, err = run(script, tmp_path, MODEL="a/b", FAILS="2,3")
    assert (status, len(calls), err.count("\n")) == (3, 2, 1)
    has_values(err, "status 3")


def test_a_script_that_is_ended_ends_its_servers(tmp_path: Path) -> None:
    run("true", tmp_path)  # for the folder of programs
    (tmp_path / "bin/vllm").write_text(f"#!/bin/sh\ntouch {tmp_path}/$CUDA_VISIBLE_DEVICES\nexec sleep 60\n")
    script = parts("vllm", "replicas-int4")["vllm"]
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "MODEL": "a/b"}
    shell = subprocess.Popen(["bash", "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / gpus).exists() for gpus in ("0,1", "2,3")):
        assert shell.poll() is None
        time.sleep(0.01)
    servers = psutil.Process(shell.pid).children()
    shell.terminate()
    assert (shell.communicate(timeout=30)[1], shell.returncode, len(servers)) == ("", 143, 2)
    assert not any(map(psutil.Process.is_running, servers))


def test_vllm_on_two_nodes(tmp_path: Path) -> None:
    where = {"NODE0_ADDRESS": "head", "NODE1_ADDRESS": "worker", "NETWORK_INTERFACE": "eth7"}
    files = parts("vllm", "two-nodes")
    assert list(files) == ["node-0.sh", "node-1.sh"]
    status, calls, _ = run(files["node-0.sh"], tmp_path, **where)
    ray, serve = calls
    assert status == 0
    said = flags(ray["words"])
    assert said == {"head": [], "port": ["6379"], "node-ip-address": ["head"], "num-gpus": ["8"]}
    said = flags(serve["words"])
    assert said["distributed-executor-backend"] == ["ray"] and "headless" not in said
    assert (said["tensor-parallel-size"], said["pipeline-parallel-size"]) == (["8"], ["2"])
    for call in calls:
        seen = call["environment"]
        assert (seen["VLLM_HOST_IP"], seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == (
            "head",
            "eth7",
            "=eth7",
        )
        assert seen["VLLM_PP_LAYER_PARTITION"] == "63,63"
    status, (ray,), _ = run(files["node-1.sh"], tmp_path, **where)
    said = flags(ray["words"])
    assert said == {"address": ["head:6379"], "node-ip-address": ["worker"], "num-gpus": ["8"], "block": []}
    assert ray["environment"]["VLLM_HOST_IP"] == "worker"


def test_vllm_experts_on_two_nodes(tmp_path: Path) -> None:
    where = {"NODE0_ADDRESS": "head", "NODE1_ADDRESS": "worker", "NETWORK_INTERFACE": "eth7"}
    files = parts("vllm", "experts-two-nodes")
    said = [flags(run(files[f"node-{node}.sh"], tmp_path, **where)[1][0]["words"]) for node in (0, 1)]
    for given in said:
        assert given["enable-expert-parallel"] == [] and given["data-parallel-address"] == ["head"]
        assert (given["data-parallel-size"], given["data-parallel-size-local"]) == (["4"], ["2"])
    assert "data-parallel-start-rank" not in said[0] and "headless" not in said[0] and "port" in said[0]
    assert said[1]["data-parallel-start-rank"] == ["2"] and said[1]["headless"] == [] and "port" not in said[1]


def test_a_cut_that_vllm_lacks_becomes_the_nearest_one() -> None:
    status, out, err = emit("vllm", "tensor-uneven")
    assert status == 0 and "--pipeline-parallel-size 2" in out and "tensor-split" not in out.partition("set -euo")[2]
    has_values(err, "vLLM", "TP 2, bf16 with 30 and 10 query heads", "nearest", "PP 2")
    # Nine heads on two ranks.
    status, out, err = emit("vllm", "demo --gpus 2xRTX4090 -tp 2")
    assert status == 0 and re.search(r"\b9 query and 3 KV heads .*\b2 ranks", err)
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct" in out


def test_a_cut_of_weft_beyond_the_target_is_told() -> None:
    words = "Qwen3-14B --gpus 1xRTX4090+1xRTX3060"
    (gap,) = exported_gaps(f"vllm {words}")
    assert gap.code == "uneven_cut_left_out" and str(gap.values["cut"]).startswith("TP 2, ")
    assert str(gap) in emit("vllm", words)[1].replace("\n#   ", " ")
    assert exported_gaps("vllm Qwen3-8B --gpus 2xRTX4090") == []


@pytest.mark.parametrize("plan", plans("weft"))
def test_weft_reads_its_own_flags(plan: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for written in parts("weft", plan).values():
        status, calls, _ = run(written, tmp_path, MODEL="a/b")
        assert status == 0 and calls
        for call in calls:
            arguments = parsed(call["words"][1:])
            engine_config(arguments)
            assert serve_options(arguments, {}).port >= 8000
    assert [it for it in caplog.records if it.levelname == "WARNING" and "ignored" in it.message] == []


def test_weft_is_told_the_planned_cut(tmp_path: Path) -> None:
    def config(plan: str) -> Any:
        call = run(parts("weft", plan)["weft"], tmp_path)[1][0]
        return engine_config(parsed(call["words"][1:]))

    uneven = config("tensor-uneven")
    assert uneven.tensor_split == (3.0, 1.0) and len(uneven.gpu_memory_utilization) == 2
    assert config("pipeline-uneven").pipeline_split == (28, 20)
    assert (config("tensor").tensor_parallel_size, config("tensor").max_model_len) == (4, 131072)


HELD = """
nodes:
- gpus:
  - {name: RTX 4090, held: 4GB}
  - {name: RTX 4090}
"""


def shares(target: str, words: str, folder: Path) -> list[str]:
    """--gpu-memory-utilization of each server, on two cards of which others hold 4 GB of the first one."""
    (folder / "rig.yaml").write_text(HELD)
    status, calls, _ = run(emit(target, f"{words} --gpus {folder}/rig.yaml")[1], folder)
    assert status == 0
    in_order = sorted(calls, key=lambda call: str(call["environment"]["CUDA_VISIBLE_DEVICES"]))
    return [flags(call["words"])["gpu-memory-utilization"][0] for call in in_order]


def test_memory_of_others_counts_as_each_engine_counts_it(tmp_path: Path) -> None:
    # Weft takes a share less what others hold of it: nine tenths are nine tenths of the card.
    assert shares("weft", "Qwen2.5-14B-Instruct -tp 2 --max-model-len 8192", tmp_path) == ["0.9"]
    assert shares("weft", "Qwen3-4B -tp 1 -dp 2 --max-model-len 8192", tmp_path) == ["0.9", "0.9"]
    # vLLM takes its share beside what others hold, and starts only where so much is free on each of its cards.
    free = (24564 * 2**20 - 4e9 - 2**30) / (24564 * 2**20)
    (share,) = shares("vllm", "Qwen2.5-14B-Instruct -tp 2 --max-model-len 8192", tmp_path)
    assert free - 0.001 <= float(share) <= free
    first, second = shares("vllm", "Qwen3-4B -tp 1 -dp 2 --max-model-len 8192", tmp_path)
    assert float(first) <= free and second == "0.9"


@pytest.mark.parametrize(
    ("target", "gpus", "kept", "said"),
    [
        ("weft", "1xRTX4090", "fp8", ["fp8"]),
        ("weft", "1xRTX4090", "fp8_e5m2", ["fp8"]),
        ("weft", "1xRTX3090", "fp8", None),
        ("vllm", "1xRTX4090", "fp8_e5m2", ["fp8_e5m2"]),
        ("vllm", "1xRTX3090", "fp8", ["fp8"]),
    ],
)
def test_a_narrow_cache_is_what_the_length_was_planned_with(
    target: str, gpus: str, kept: str, said: list[str] | None, tmp_path: Path
) -> None:
    words = f"Llama-3.1-8B-Instruct --gpus {gpus}"

    def serve(*more: str) -> tuple[dict[str, list[str]], str]:
        out = emit(target, words, *more)[1]
        return flags(run(out, tmp_path)[1][0]["words"]), out

    (usual, _), (narrow, written) = serve(), serve("--kv-cache-dtype", kept)
    assert narrow.get("kv-cache-dtype") == said
    longer = int(narrow["max-model-len"][0]) / int(usual["max-model-len"][0])
    assert longer > 1.9 if said else longer == 1
    codes = [gap.code for gap in exported_gaps(f"{target} {words} --kv-cache-dtype {kept}")]
    assert codes == ([] if said else ["kv_cache_widened"])
    assert ("fp8_e5m2" in written) == (kept == "fp8_e5m2"), "in a comment, if Weft's kind of fp8 takes its place"


# --- Ollama ---


@pytest.mark.parametrize("plan", plans("ollama"))
def test_the_modelfile_has_instructions_only(plan: str) -> None:
    modelfile = parts("ollama", plan)["Modelfile"]
    lines = [line for line in modelfile.splitlines() if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines] == ["FROM", "PARAMETER", "PARAMETER"]
    parameters = {words[1]: int(words[2]) for words in (line.split() for line in lines[1:])}
    assert parameters.keys() == {"num_ctx", "num_gpu"}


def test_ollama_gets_a_server_for_each_replica(tmp_path: Path) -> None:
    files = parts("ollama", "replicas-int4")
    status, calls, _ = run(files["ollama.sh"], tmp_path)
    assert status == 0
    serving = [call["environment"] for call in calls if call["words"][1] == "serve"]
    assert sorted((it["CUDA_VISIBLE_DEVICES"], it["OLLAMA_HOST"]) for it in serving) == [
        ("0,1", "127.0.0.1:11434"),
        ("2,3", "127.0.0.1:11435"),
    ]
    assert {it["OLLAMA_SCHED_SPREAD"] for it in serving} == {"1"}
    # What it calls its models has no capitals; a run without a prompt loads one.
    assert ["ollama", "run", "qwen2.5-32b-instruct", ""] in [call["words"] for call in calls]
    assert re.search(r"\bint4\b.*\bq4_k_m\b", files["Modelfile"])
    assert "distributes layers by each GPU's free memory" in files["Modelfile"]


def test_ollama_has_one_gpu_where_one_holds_the_model() -> None:
    assert "SCHED_SPREAD" not in parts("ollama", "one-gpu")["ollama.sh"]


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("Qwen/Qwen3:8B", "qwen3:8b"),
        ("模型", "model"),
        ("-x-", "x"),
        ("a:b:c", "a:b-c"),
        ("::", "model"),
        ("A b!", "a-b"),
    ],
)
def test_every_name_becomes_one_of_ollama(name: str, called: str, tmp_path: Path) -> None:
    if name.startswith("-"):
        name = f"x/{name}"
    out = emit("ollama", "Qwen3-0.6B --gpus 1xL4", "--served-model-name", name)[1]
    assert f"ollama create {called} --file Modelfile" in out
