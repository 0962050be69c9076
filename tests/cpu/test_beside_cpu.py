"""Layers on a CPU beside GPUs: stages of a rank with the C++ kernels, beside a stand-in for a GPU (fake_cuda.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

from tests.cpu import card_worker, tiny
from tests.cpu.fake_cuda import Card, host_with_card, the_card  # noqa: F401
from weft import LLM, SamplingParams
from weft.plan.plan import named_devices

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "executor": "inline",
    "max_model_len": 128,
    "kv_cache_memory_bytes": 1_000_000,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
}
FIRST = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "": 0}
LAST = {"": 0, "model.layers.1": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
PROMPTS = [{"prompt_token_ids": [3 + (7 * i + 3 * j) % 22 for j in range(1 + 13 * i)]} for i in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("beside") / "tiny"))


@pytest.fixture(scope="module")
def truth(path: str) -> list[list[int]]:
    with LLM(path, **COMMON, device="cpu", tensor_parallel_size=1) as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=5, ignore_eos=True) for i in range(len(PROMPTS))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ({"device_map": FIRST}, ("cpu", "cuda:0")),
        ({"device_map": LAST}, ("cuda:0", "cpu")),
        ({"device_ids": ("cpu", 0), "pipeline_parallel_size": 2, "attention_backend": "triton"}, ("cpu", "cuda:0")),
    ],
    ids=["the CPU first", "the CPU last", "kernels of GPUs by name"],
)
def test_a_stage_on_the_cpu_makes_the_same_tokens(
    path: str, truth: list[list[int]], card: Card, how: dict[str, Any], devices: tuple[str, ...]
) -> None:
    with LLM(path, **COMMON, **how) as llm:
        assert llm.plan.devices == named_devices(*devices)
        assert llm.plan.uses_cpu and not llm.plan.on_cpu and llm.plan.graphs
        assert tokens(llm) == truth
        rows = llm.layout()
        assert [row["device"] for row in rows] == list(devices)
        on_cpu = rows[devices.index("cpu")]
        assert on_cpu["layers"] == 1 and on_cpu["driver_bytes"] is None
        if devices[0] == "cpu" and "device_map" in how:
            llm.sleep()
            llm.wake_up()
            assert tokens(llm) == truth
    assert card.replays > 0  # steps of the GPU's stage are graphs, as without a CPU


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ({"device_map": FIRST}, ["cpu", "cuda:0"]),
        ({"device_ids": (0, "cpu"), "pipeline_parallel_size": 2}, ["cuda:0", "cpu"]),
    ],
    ids=["the CPU first", "the CPU last"],
)
def test_stages_as_processes(
    path: str, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], devices: list[str]
) -> None:
    """A process for each rank: that of the GPU has a stand-in, that of the CPU has no CUDA at all."""
    monkeypatch.setattr("weft.engine.llm.probe_host", host_with_card)
    monkeypatch.setattr("weft.engine.replicas.local.WORKER", card_worker.HERE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with LLM(path, **{**COMMON, **how, "executor": "processes"}) as llm:
        assert llm.plan.uses_cpu and not llm.plan.on_cpu and llm.plan.graphs
        rows = llm.layout()
        assert [row["device"] for row in rows] == devices
        for row in rows:  # measured in the rank's own process
            assert row["allocated_bytes"] > 0 and (row["driver_bytes"] is None) == (row["device"] == "cpu")
        assert tokens(llm) == truth
        llm.sleep()  # for which the worker on the card wants to have replayed graphs
        llm.wake_up()
        assert tokens(llm) == truth
