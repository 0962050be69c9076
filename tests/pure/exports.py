"""Output of weft plan --emit for a few plans."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tests.conftest import GOLDEN
from tests.pure.commands import weft
from weft import __version__
from weft.engine.client.vllm import vllm_arguments
from weft.study.export.targets import TARGETS

# Flags of vllm serve that Weft has too, in its documentation of version 0.12 and later.
SHARED = """
tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel distributed-executor-backend
max-model-len max-num-seqs max-num-batched-tokens gpu-memory-utilization dtype tokenizer served-model-name host port
nnodes node-rank master-addr master-port headless
"""
VLLM = {*vllm_arguments(), *SHARED.split()}
# Those that take no value.
SWITCHES = {"enable-expert-parallel", "headless", *(name for name, flag in vllm_arguments().items() if not flag.arity)}
PLANS = {
    "one-gpu": "Llama-3.1-8B-Instruct --gpus 1xRTX4090 --max-model-len 8192",
    "tensor": "Llama-3.3-70B-Instruct --gpus 4xA100 -tp 4 --served-model-name llama llama-70b",
    "pipeline-uneven": "Qwen2.5-14B-Instruct --gpus 2xRTX4090 --pipeline-split 28,20 --max-model-len 8192",
    "replicas-int4": "Qwen2.5-32B-Instruct --gpus 4xRTX4090 --precision int4 -tp 1 -pp 2 -dp 2 --max-model-len 16384",
    "two-nodes": "Llama-3.1-405B-Instruct --nodes 2x8xH100 -tp 8 -pp 2 --max-model-len 32768",
    "experts": "Qwen3-30B-A3B --gpus 4xA100 -tp 2 -dp 2 --enable-expert-parallel",
}
# Plans that are of interest to some targets only.
MORE = {
    "tensor-uneven": "Qwen3-14B --gpus 1xRTX4090+1xRTX3060 --tensor-split 3,1 --max-model-len 2048",
    "two-nodes-replicas": "Qwen3-32B --nodes 2x2xA100 -tp 2 -dp 2 --port 9000",
    "experts-two-nodes": "Qwen3-30B-A3B --nodes 2x2xA100 -tp 1 -dp 4 --enable-expert-parallel --engine vllm",
    "mixed-node": "Llama-3.1-8B-Instruct --gpus 1xRTX4090+1xRTX3090 -tp 1 -pp 2 --max-model-len 8192",
    "mixed-nodes": "Llama-3.1-8B-Instruct --nodes 1x2xRTX4090+1x2xL40S -tp 2 -dp 2 --max-model-len 8192",
    "amd": "Llama-3.1-8B-Instruct --gpus 2xMI300X -tp 2 --engine vllm",
    "two-nodes-vllm": "Llama-3.1-405B-Instruct --nodes 2x8xH100 -tp 8 -pp 2 --max-model-len 32768 --engine vllm",
    "engine-vllm": "Qwen2.5-7B-Instruct --gpus 2xRTX4090 -tp 1 -dp 2 --max-model-len 8192 --engine vllm",
}
INTEREST = {
    "weft": ("tensor-uneven", "two-nodes-replicas"),
    "vllm": ("tensor-uneven", "two-nodes-replicas", "experts-two-nodes", "amd"),
    "ollama": ("tensor-uneven",),
    "infernet": ("engine-vllm",),
    "systemd": ("tensor-uneven", "two-nodes-replicas"),
    "nginx": ("two-nodes-replicas",),
    "kuberay": ("mixed-node", "mixed-nodes", "amd", "two-nodes-vllm", "engine-vllm"),
    "compose": ("two-nodes-replicas", "amd", "engine-vllm"),
}
CASES = [(target, plan) for target in TARGETS for plan in (*PLANS, *INTEREST.get(target, ()))]


def emit(target: str, plan: str, *more: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of weft plan."""
    return weft("plan", *(PLANS | MORE).get(plan, plan).split(), "--emit", target, *more)


@cache
def known(target: str, plan: str) -> tuple[int, str, str]:
    """The same for a plan of the table, once."""
    return emit(target, plan)


def text(target: str, plan: str) -> str:
    """The files, or the line with the reason why there are none; without figures that calibrations change."""
    status, out, err = known(target, plan)
    if status:
        assert status == 3 and not out, err
        return f"exit status {status}\n{err}"
    told = out.replace(f"weft {__version__}", "weft VERSION")
    return re.sub(r"(# Predicted with \S+), within.*?fit\.", r"\1.", told, flags=re.DOTALL)


def parts(target: str, plan: str) -> dict[str, str]:
    """The files by name; a single one by the name that it would have."""
    out = known(target, plan)[1]
    found = re.split(r"^# ======== (.+) ========\n", out, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True)) if len(found) > 1 else {target: out}


def golden_name(target: str, plan: str) -> str:
    """The name of the golden text."""
    return f"emit/{target}/{plan}.txt"


def is_written(target: str, plan: str) -> bool:
    """Look in the golden text of a case, which a test of its own compares: each process of the tests asks while it
    collects them, and making all plans takes seconds."""
    golden = GOLDEN / golden_name(target, plan)
    if not golden.exists():
        return known(target, plan)[0] == 0
    return not golden.read_text(encoding="utf-8").startswith("exit status ")


def plans(target: str) -> list[str]:
    """Plans that are written for a target."""
    return [plan for it, plan in CASES if it == target and is_written(target, plan)]


# A program that only says how it was called; on the GPUs that $FAILS names it fails.
RECORD = """#!/bin/sh
printf '%s\\0' "${{0##*/}}" "$@" >"{calls}/$$.words"
env -0 >"{calls}/$$.environment"
[ "${{CUDA_VISIBLE_DEVICES:-all}}" != "${{FAILS:-none}}" ] || exit 3
"""


def run(script: str, folder: Path, **variables: str) -> tuple[int, list[dict[str, Any]], str]:
    """A script with programs that only say how they were called: its status, the calls, its standard error."""
    programs, calls = folder / "bin", folder / "calls"
    shutil.rmtree(calls, ignore_errors=True)
    for made in (programs, calls):
        made.mkdir(exist_ok=True)
    stubs = dict.fromkeys(("weft", "vllm", "ray", "ollama"), RECORD.format(calls=calls))
    stubs["python3"] = "#!/bin/sh\necho 16\n"  # GPUs that Ray counts
    for name, stub in stubs.items():
        (programs / name).write_text(stub)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash"], input=script, text=True, env=environment, capture_output=True, timeout=60)
    found = []
    for words in calls.glob("*.words"):
        seen = words.with_suffix(".environment").read_text().split("\0")[:-1]
        call = {"words": words.read_text().split("\0")[:-1], "environment": dict(it.split("=", 1) for it in seen)}
        found.append(call)
    return done.returncode, sorted(found, key=lambda call: json.dumps(call["words"])), done.stderr


def flags(words: list[str]) -> dict[str, list[str]]:
    """Each flag with its values."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            found[name] = []
        elif name:
            found[name].append(word)
    return found
