"""The words of weft plan: every sentence has a code, and its wording lies in tests/data/golden/plan.txt."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import weft.planner
from tests.pure.commands import weft_json
from weft.checkpoint.architectures.registry import RUNNABLE
from weft.planner.note import create_note, templates

# Plans that need between them most of the sentences.
COMMANDS = (
    "Qwen3-32B --gpus 1xRTX4090+1xRTX3090 -q int4",
    "Qwen3-32B --gpus 1xRTX4090+1xRTX3090",
    "deepseek-v3 --nodes 2x8xH200",
    "DeepSeek-V2-Lite --gpus 2xH100 -tp 2 --kv-cache-dtype fp8",
    "gemma-2-2b-it --gpus 1xH100",
    "Llama-3.1-8B-Instruct --gpus 2xRTX4090",
    "Llama-3.1-8B-Instruct --gpus 2xT4 --precision bf16",
    "Llama-3.1-70B --gpus 1xH100",
    "Llama-3.1-70B-Instruct --gpus 3xH100 -dp 1 --engine vllm",
    "Llama-3.1-70B-Instruct --gpus 4xH100 --tensor-split 3,1,1,1 --engine vllm",
    "Llama-3.1-8B --gpus 2xA100 --tensor-split 30,1",
    "Llama-3.1-8B --gpus 4xH100 -tp 1 -pp 1 -dp 1",
    "mistralai/Mixtral-8x7B-v0.1 --gpus 2xRTX3090 --precision q4_k_m --engine llama.cpp",
    "mistralai/Mixtral-8x7B-v0.1 --gpus 2xH100 --precision q4_k_m --engine trtllm",
    "Llama-3.1-8B --gpus 1xH100 --precision int4 --engine llama.cpp",
    "Qwen-72B-Chat --gpus 2xA100 --max-model-len 32768",
    "Qwen-72B-Chat --gpus 2xA100 --input-len 30000 --output-len 2000",
    "Qwen2.5-3B --gpus 1xH100+1xRTX3060",
    'Qwen3-8B --gpus 1xRTX4090 --speculative-config {"model":"Qwen3-0.6B"}',
    'Qwen3-8B --gpus 1xRTX3090 --speculative-config {"model":"Qwen3-4B"}',
    'gpt-oss-120b --gpus 2xH100 --speculative-config {"model":"gpt-oss-20b"}',
    "Qwen3-8B --gpus 1xRTX5090 --precision nvfp4",
    "Qwen3-8B --gpus 1xRTX3090 --kv-cache-dtype fp8",
    "Qwen3-0.6B --gpus 1xRTX4090 --gpu-memory-utilization 0.01",
    "Llama-3.1-8B --gpus 2xA100 --max-memory 0=20GB,cpu=64GB",
    "Qwen3-30B-A3B --gpus 4xRTX4090 --precision int4 --engine vllm -tp 4",
    "Meta-Llama-3-8B --gpus 1xV100 --precision fp16 --input-len 9000",
    "Llama-3.1-70B --gpus 1xH100 --precision q2_k",
    "Qwen2.5-72B --gpus 2xRTX4090 --precision int4",
    "Qwen2.5-72B-Instruct --gpus 4xA100 -tp 1 -pp 1 -dp 1",
    "SmolLM2-135M --gpus 1xH100 --objective latency",
)


def words(command: str) -> str:
    """The sentences of a plan, each after its code; the architectures that run are RUNNABLE."""
    found = weft_json("plan", *command.split())[1]
    lines = [f"$ weft plan {command}", f"  {found['summary_code']}: {found['summary']}"]
    lines += _listed(found["why_codes"], [found["why"]] if found["why"] else [])
    lines += _listed(found["model"]["missing_codes"], found["model"]["missing"])
    lines += _listed(found["note_codes"], found["notes"])
    lines += _listed([it["code"] for it in found["rejected"]], [it["reason"] for it in found["rejected"]])
    lines.append(f"  {found['binding']['code']}: {found['binding']['text']}")
    lines += _listed(found["advice_codes"], found["advice"])
    return "\n".join(lines).replace(", ".join(RUNNABLE), "RUNNABLE") + "\n"


def _listed(codes: list[str], sentences: list[str]) -> list[str]:
    """Sentences with their codes; those of one line share it."""
    if len(sentences) == 1:
        return [f"  {', '.join(codes)}: {sentences[0]}"]
    return [f"  {code}: {sentence}" for code, sentence in zip(codes, sentences, strict=True)]


def test_the_words_of_weft_plan(golden: Callable[[str, str], None]) -> None:
    golden("plan.txt", "\n".join(map(words, COMMANDS)))


def test_every_code_is_used_and_known() -> None:
    package = Path(weft.planner.__file__).parents[1]
    sources = "".join(
        path.read_text() for room in ("planner", "cli", "study", "monitor") for path in (package / room).rglob("*.py")
    )
    used = set(re.findall(r"\"([a-z0-9_]+)\"", sources)) | {"bound_by_bandwidth", "bound_by_compute"}
    used |= {"bound_by_links", "bound_by_memory"}
    assert templates().keys() <= used
    created = set(re.findall(r"create_note\(\s*\"([a-z0-9_]+)\"", sources))
    assert created <= templates().keys()


def test_a_note_is_its_code_and_values_in_words(golden: Callable[[str, str], None]) -> None:
    gains = {"context": 2.0, "speed": 1.26, "both": True, "measure": "throughput", "cut": "TP 2", "kv_tokens": 5000}
    notes = [
        create_note("more_gpus", count=1, gpu="L4", cut="TP 2", spare="1 GB"),
        create_note("more_gpus", count=2, gpu="L4", cut="TP 2", spare="1 GB"),
        create_note("to_spare", spare_bytes=1.5e9, per_gpu=True),
        create_note("to_spare", spare_bytes=2e6, per_gpu=False),
        create_note("gpus_left_out", count=2, gpus=[1, 3]),
        create_note("gains", **gains),
    ]
    for note, values in zip(notes, ("1 more", "2 more", "1.5 GB", "2 MB", "1, 3", "2.0x 1.3x TP 5,000"), strict=True):
        assert all(value in str(note) for value in values.split())
    golden("notes.txt", "".join(f"{note}\n" for note in notes))
