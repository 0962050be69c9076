"""Checkpoints of architectures that Weft does not know: their size is summed, and whether they fit is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from tests.pure import gguf_files
from tests.pure.commands import weft, weft_json
from tests.refusals import refuses
from weft.checkpoint.config import library
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.outline import estimate_kv, read_outline
from weft.errors import ModelError
from weft.machine.hardware.cluster import parse_gpus
from weft.planner.memory.outline_fit import SET_ASIDE, fit_outline, usable_bytes

CONFIG: dict[str, Any] = {
    "architectures": ["NobodyForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MAMBA = {"architectures": ["MambaForCausalLM"], "n_layer": 3, "hidden_size": 32, "state_size": 16, "expand": 2}


def write(folder: Path, config: dict[str, Any], layers: int, prefix: str = "model.layers") -> int:
    """A checkpoint in float16 and, for one layer, float32; the bytes of its tensors."""
    tensors = {f"{prefix}.{layer}.mixer.weight": np.zeros((64, 32), np.float16) for layer in range(layers)}
    tensors |= {f"{prefix}.1.mixer.extra": np.zeros(32, np.float32), "embed.weight": np.zeros((100, 32), np.float16)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def test_weights_are_summed_exactly(tmp_path: Path) -> None:
    stored = write(tmp_path, CONFIG, 4)
    outline = read_outline(str(tmp_path))
    assert outline.weight_bytes == stored and outline.architecture == "NobodyForCausalLM"
    assert outline.layer_bytes == (4096, 4096 + 128, 4096, 4096) and outline.other_bytes == 6400
    assert outline.context == 4096 and not outline.equal_layers
    assert outline.kv.low == outline.kv.high == 4 * 2 * 2 * 8 * 2 and outline.kv.state == 0


def test_a_plan_says_that_it_fits_and_does_not_run(tmp_path: Path) -> None:
    stored = write(tmp_path, CONFIG, 4)
    status, found = weft_json("plan", str(tmp_path), "--gpus", "2xRTX4090", "--max-model-len", "512")
    assert status == 0 and found["runs"] is False and found["best"] is None and "NobodyForCausalLM" in found["reason"]
    assert found["model"]["weight_bytes"] == stored and found["model"]["kv_bytes_per_token"] == 256
    assert found["fit"]["verdict"] == "fits" and found["fit"]["kv_high_bytes"] == 512 * 256
    (share,) = found["fit"]["shares"]
    assert share["layers"] == 4 and share["weight_bytes"] == stored
    status, text, _ = weft("plan", str(tmp_path), "--gpus", "2xRTX4090")
    assert status == 0 and re.search(r"\b1 of 2 devices", text)


def test_a_model_without_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers knows its class, which does not run; tests/cpu/test_library_models.py asks the child for that."""
    monkeypatch.setattr(library, "_ask_child", lambda config: library.LibraryReport(refusal="it keeps states"))
    write(tmp_path, MAMBA, 3, "backbone.layers")
    outline = read_outline(str(tmp_path))
    assert len(outline.layer_bytes) == 3 and outline.kv.low == outline.kv.high == 0
    assert outline.kv.state == 3 * 64 * 16 * 4 and outline.kv.reason
    status, found = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090", "--concurrency", "8")
    assert status == 0 and found["fit"]["kv_high_bytes"] == 8 * outline.kv.state and found["fit"]["requests"] == 8


def test_a_gguf_file(tmp_path: Path) -> None:
    metadata = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "context_length": 1024}
    tensors = {
        "blk.0.mixer.weight": np.zeros((64, 64), np.float32),
        "blk.1.mixer.weight": np.zeros((64, 64), np.float16),
        "token_embd.weight": np.zeros((10, 64), np.float32),
    }
    own = {f"nobody.{key}": value for key, value in metadata.items()}
    path = gguf_files.write(tmp_path / "a.gguf", "nobody", own, tensors)
    outline = read_outline(str(path))
    assert outline.architecture == "nobody" and outline.layer_bytes == (16384, 8192) and outline.other_bytes == 2560
    assert outline.kv.high == 2 * 2 * 4 * 16 * 2 and outline.context == 1024
    status, found = weft_json("plan", str(path), "--gpus", "1xRTX4090")
    assert status == 0 and found["fit"]["length"] <= 1024 and found["runs"] is False


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        ({}, 256, 256),
        ({"head_dim": 32}, 1024, 1024),
        ({"num_key_value_heads": None, "multi_query": True}, 128, 128),
        ({"num_key_value_heads": None}, 1024, 1024),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention", "full_attention"]}, 128, 256),
        ({"sliding_window": 128}, 0, 256),
        ({"sliding_window": 128, "use_sliding_window": True}, 0, 256),
        ({"sliding_window": 128, "use_sliding_window": False}, 256, 256),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 4}, 4 * 20 * 2, 256),
        ({"num_key_value_heads": [2, 0, 0, 1]}, 96, 96),
        ({"state_size": 16}, 0, 256),
        ({"hidden_size": None}, 0, 0),
    ],
    ids=str,
)
def test_estimates_of_the_kv_cache(change: dict[str, Any], low: int, high: int) -> None:
    kv = estimate_kv(Fields(CONFIG | change, "config.json"), 4)
    assert (kv.low, kv.high) == (low, high) and kv.reason and kv.known is (high > 0)


def test_layers_go_to_as_few_devices_as_hold_them(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, 4)
    cluster = parse_gpus("4xRTX4090")
    room = usable_bytes(cluster.gpus[0], 0.9)
    assert 0 < room == int(cluster.gpus[0].memory_bytes * 0.9) - SET_ASIDE
    outline = read_outline(str(tmp_path))
    for requests, devices in ((1, 1), (room // 1_000_000, 2), (room // 400_000, 4)):
        fit = fit_outline(outline, cluster, length=4096, requests=requests)
        assert fit.verdict == "fits" and len(fit.shares) == devices
        assert fit.shares[0].first_layer == 0 and sum(share.layers for share in fit.shares) == 4
        assert all(share.weight_bytes + share.kv_bytes <= share.usable_bytes for share in fit.shares)
    assert fit_outline(outline, cluster, length=4096, requests=room // 200_000).verdict == "does not fit"


def test_what_fits_by_the_lower_estimate_only(tmp_path: Path) -> None:
    write(tmp_path, CONFIG | {"sliding_window": 64}, 4)
    status, found = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090", "--concurrency", "100000")
    assert status == 0 and found["fit"]["verdict"] == "may fit"
    write(tmp_path, CONFIG, 4)
    status, found = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090", "--concurrency", "100000")
    assert status == 3 and found["fit"]["verdict"] == "does not fit" and not found["fit"]["shares"]


def test_a_config_without_layers(tmp_path: Path) -> None:
    write(tmp_path, {"architectures": ["NobodyForCausalLM"]}, 4)
    with refuses(ModelError, "no-layer-count", "num_hidden_layers"):
        read_outline(str(tmp_path))
    status, _, error = weft("plan", str(tmp_path), "--gpus", "1xRTX4090")
    assert status != 0 and "NobodyForCausalLM" in error and "num_hidden_layers" in error


def test_what_nobody_knows_is_not_said_to_fit(tmp_path: Path) -> None:
    write(tmp_path, CONFIG | {"hidden_size": None}, 4)
    status, report = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090")
    assert status == 0 and report["fit"]["verdict"] == "may fit"
    assert report["model"]["kv_bytes_per_token"] is report["model"]["kv_bytes_per_token_range"] is None
    status, text, _ = weft("plan", str(tmp_path), "--gpus", "1xRTX4090")
    assert status == 0 and "It may fit" in text and "KV cache  unknown" in text


def test_a_bound_of_the_speed_only_if_every_token_reads_every_layer(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, 4)
    _, report = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090")
    layers = sum(read_outline(str(tmp_path)).layer_bytes)
    assert report["fit"]["bound_tok_s"] == pytest.approx(parse_gpus("1xRTX4090").gpus[0].bandwidth_Bps / layers)
    for experts in ({"n_experts": 8}, {"ffn_config": {"moe_num_experts": 16}}):
        write(tmp_path, CONFIG | experts, 4)
        _, report = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090")
        assert report["fit"]["bound_tok_s"] is None
    _, text, _ = weft("plan", str(tmp_path), "--gpus", "1xRTX4090")
    assert "no bound" in text and "at most" not in text
    write(tmp_path, CONFIG | {"moe_layers": [], "expert_dropout": 0.0}, 4)
    assert not read_outline(str(tmp_path)).mixture
    write(tmp_path, CONFIG, 4, "model.layers")
    save_file({"model.layers.0.experts.0.up": np.zeros((4, 4), np.float16)}, tmp_path / "model.safetensors")
    assert read_outline(str(tmp_path)).mixture


def test_a_repository_in_the_cache_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--nobody"
    stored = write(repository / "snapshots" / "c0ffee", CONFIG, 4)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    assert read_outline("owner/nobody").weight_bytes == stored
    status, report = weft_json("plan", "owner/nobody", "--gpus", "1xRTX4090")
    assert status == 0 and report["model"]["weight_bytes"] == stored and report["runs"] is False
    (repository / "snapshots" / "c0ffee" / "model.safetensors").unlink()
    with refuses(ModelError, "unknown-model-offline", "owner/nobody"):
        read_outline("owner/nobody")


def test_a_class_that_cannot_be_described_leads_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ModelError("Transformers cannot describe the model", code="cannot-describe-model")

    stored = write(tmp_path, CONFIG | {"architectures": ["Olmo2ForCausalLM"]}, 4)
    monkeypatch.setattr(library, "_ask_child", fail)
    status, report = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090")
    assert (
        status == 0
        and report["model"]["weight_bytes"] == stored
        and "Transformers cannot describe the model" in report["reason"]
    )


def test_a_library_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write(tmp_path, CONFIG | {"architectures": ["Olmo2ForCausalLM"]}, 4)
    monkeypatch.setattr(library.metadata, "version", lambda name: "4.57.1")
    with refuses(ModelError, "transformers-too-old", 5, "4.57.1", "pip install"):
        library.library_folder()
    status, report = weft_json("plan", str(tmp_path), "--gpus", "1xRTX4090")
    assert status == 0 and report["model"]["weight_bytes"] == stored and "4.57.1" in report["reason"]
