"""Checkpoint: every way to name a model, and one clear line for each that leads nowhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from tests.log_events import logged
from tests.pure.gguf_files import write_model
from tests.pure.shapes import dense_shape
from tests.refusals import refusal_line, refuses
from weft.checkpoint.architectures.shape import Rope
from weft.checkpoint.checkpoint import Checkpoint, resolve
from weft.checkpoint.hub import demo
from weft.checkpoint.hub import files as hub_files
from weft.checkpoint.tensor_index import expected_tensors
from weft.errors import ModelError

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "eos_token_id": 3,
}
SHAPE = dense_shape(
    architecture="Qwen3ForCausalLM",
    layers=2,
    hidden=8,
    q_heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=16,
    vocab=12,
    max_positions=32768,
    rope=Rope(),
    qk_norm=True,
    dtype="float16",
    eos=(3,),
)


def weights(dtype: type = np.float16) -> dict[str, np.ndarray]:
    return {name: np.zeros(dims, dtype=dtype) for name, dims in expected_tensors(SHAPE)}


def write(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def fails(model: str | Path, code: str, *values: object, **options: Any) -> str:
    """The line of the refusal, without the path of a model of this test."""
    with refuses(ModelError, code, *values) as caught:
        resolve(str(model), **options)
    return refusal_line(caught.value, *([model] if isinstance(model, Path) else []))


def test_a_directory(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5], "top_p": 0.9}')
    checkpoint = resolve(str(folder))
    assert checkpoint == Checkpoint(
        model=str(folder),
        path=str(folder),
        format="safetensors",
        shape=msgspec.structs.replace(SHAPE, eos=(3, 5)),
        generation={"top_p": 0.9},
    )
    assert {name: info.dims for name, info in checkpoint.tensors().items()} == dict(expected_tensors(SHAPE))
    # A file of the directory means the directory.
    for name in ("config.json", "model.safetensors"):
        assert resolve(str(folder / name)).path == str(folder)
    assert resolve(str(folder), load_format="safetensors").format == "safetensors"
    fails(folder, "other-load-format", "safetensors", "gguf", load_format="gguf")


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is then as in Transformers 5; the same head twice is one."""
    tensors = weights()
    assert resolve(str(write(tmp_path, {"tie_word_embeddings": True}))).shape.tied and not caplog.records
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.float16(1)
    write(tmp_path, {"tie_word_embeddings": True}, tensors)
    assert not resolve(str(tmp_path)).shape.tied
    assert len(caplog.records) == 1
    del tensors["lm_head.weight"]
    assert resolve(str(write(tmp_path, {"tie_word_embeddings": True}, tensors))).shape.tied


def test_home_is_where_the_tilde_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "model")
    assert resolve("~/model").path == str(tmp_path / "model")


def test_tensors_that_nobody_asks_for_are_left_out(tmp_path: Path) -> None:
    more = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, dtype=np.float64)}
    assert resolve(str(write(tmp_path, tensors=more))).tensors().keys() == weights().keys()


LORA = [f"model.layers.{layer}.self_attn.q_proj.lora_{part}.weight" for layer in range(2) for part in "AB"]


def test_tensors_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may be what makes the model: an adapter that was never merged, or modules of a newer architecture."""
    more = {name: np.ones((2, 2), dtype=np.float16) for name in [*LORA, "model.gate.bias"]}
    folder = write(tmp_path / "model", tensors=weights() | more)
    assert resolve(str(folder)).tensors().keys() == weights().keys()
    assert logged(caplog, "unread-tensors") == [{"path": str(folder), "tensors": 5}]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in ("model.layers.*.self_attn.q_proj.lora_A.weight (2)", "model.gate.bias", "--strict-checkpoint"):
        assert name in line
    line = fails(folder, "unread-tensors", 5, "model.gate.bias", "Qwen3ForCausalLM", strict=True)
    assert "lora_B.weight (2)" in line


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.vision_tower.encoder.norm.weight", "vision"),
        ("multi_modal_projector.linear.weight", "vision"),
        ("mtp.layers.0.mlp.up_proj.weight", "MTP"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "buffers"),
        ("model.mtp_layers.0.mlp.up_proj.weight", "MTP"),
        ("model.layers.0.self_attn.k_scale", "KV cache"),
        ("model.layers.0.mlp.down_proj.bias", "zeros"),
    ],
)
def test_parts_that_are_left_out_on_purpose_are_named_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, part: str
) -> None:
    folder = write(tmp_path, tensors=weights() | {name: np.zeros(2, dtype=np.float16)})
    with caplog.at_level(logging.INFO, "weft"):
        resolve(str(folder), strict=True)
    assert logged(caplog, "unread-tensors") == []
    assert [part in record.getMessage() and " 1 " in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "name", ["model.layers.0.cross_attn.vision_proj.weight", "model.layers.0.mlp.g_idx", "model.layers.0.mlp.q.weight"]
)
def test_a_name_like_those_of_such_parts_is_none_of_them(tmp_path: Path, name: str) -> None:
    fails(write(tmp_path, tensors=weights() | {name: np.zeros(2, dtype=np.float16)}), "unread-tensors", 1, strict=True)


def test_a_dummy_needs_a_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for model in (tmp_path, tmp_path / "config.json"):
        checkpoint = resolve(str(model), load_format="dummy")
        assert (checkpoint.format, checkpoint.path) == ("dummy", str(tmp_path))
        assert checkpoint.shape == msgspec.structs.replace(SHAPE, dtype="bfloat16")
        assert checkpoint.tensors() == {}
    fails(tmp_path, "no-weights")


def test_a_gguf_file_whatever_it_is_called(tmp_path: Path) -> None:
    for name in ("model.gguf", "sha256-0123"):
        write_model(tmp_path / name, SHAPE)
        checkpoint = resolve(str(tmp_path / name))
        assert (checkpoint.format, checkpoint.path) == ("gguf", str(tmp_path / name))
        assert {tensor: info.dims for tensor, info in checkpoint.tensors().items()} == dict(expected_tensors(SHAPE))
        assert resolve(str(tmp_path / name), load_format="dummy").format == "dummy"
    assert resolve(str(tmp_path)).path == str(tmp_path / "model.gguf")
    write_model(tmp_path / "another.gguf", SHAPE)
    fails(tmp_path, "several-gguf-files", "2", "another.gguf")


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "kept.gguf", SHAPE)
    monkeypatch.setattr(demo, "fetch_demo", lambda: tmp_path / "kept.gguf")
    checkpoint = resolve("demo")
    assert (checkpoint.model, checkpoint.path) == ("demo", str(tmp_path / "kept.gguf"))
    assert checkpoint.generation == {}
    write_model(tmp_path / demo.FILE, SHAPE)
    assert resolve(str(tmp_path / demo.FILE)).generation == {"temperature": 0.2, "top_p": 0.9}, "its card's"


def test_a_checkpoint_that_is_not_whole(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    whole, name = weights(), "model.layers.1.mlp.down_proj.weight"
    less = {key: value for key, value in whole.items() if key != name}
    told = fails(write(tmp_path, tensors=less), "missing-tensor", name, "[8, 16]")
    wrong = whole | {name: np.zeros((16, 8), dtype=np.float16)}
    told += fails(write(tmp_path, tensors=wrong), "tensor-of-other-dims", name, "[16, 8]", "[8, 16]")
    extra = "model.layers.2.mlp.down_proj.weight"
    told += fails(write(tmp_path, tensors=whole | {extra: whole[name]}), "more-layers-than-config", extra, "2")
    strange = whole | {name: np.zeros((8, 16), dtype=np.int8)}
    told += fails(write(tmp_path, tensors=strange), "tensor-type-not-read", name, "I8", "F32, F16, BF16, Q4_0")
    other = {"vocab_size": 13}
    told += fails(write(tmp_path, other), "tensor-of-other-dims", "embed_tokens.weight", "[12, 8]", "[13, 8]")
    golden("checkpoint.txt", told)


def test_shapes_that_cannot_be(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    told = fails(write(tmp_path, {"num_key_value_heads": 3}), "uneven-kv-heads", "4", "3")
    told += fails(write(tmp_path, {"head_dim": 5}), "odd-head-dim", "head_dim", "5")
    told += fails(write(tmp_path, {"eos_token_id": 12}), "token-beyond-vocabulary", "12", "12")
    golden("shape.txt", told)


def test_files_and_folders_that_are_no_model(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    told = fails(tmp_path / "no" / "such", "no-such-model")
    told += fails("./nothing", "no-such-model", "./nothing")
    told += fails("~nobody-of-that-name/model", "cannot-read-model", "~nobody-of-that-name/model")
    fails("x" * 300, "cannot-read-model", "x" * 300, "name too long")
    told += fails("model.gguf", "no-such-model", "model.gguf")
    told += fails(tmp_path, "directory-without-model", "config.json", ".gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    told += fails(tmp_path / "pytorch_model.bin", "pickled-file")
    (tmp_path / "notes.txt").write_text("hello")
    told += fails(tmp_path / "notes.txt", "not-a-gguf-file")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told += fails(tmp_path, "only-pickled-weights")
    golden("model_paths.txt", told)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | Exception], list[dict[str, Any]]]:
    """Makes the hub give a directory or raise; returns the list of what it was asked."""

    def answer(with_: Path | Exception) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def snapshot_download(name: str, **options: Any) -> str:
            asked.append({"name": name, **options})
            if isinstance(with_, Exception):
                raise with_
            return str(with_)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(hub_files, "fetch_files", lambda *_, **__: None)
        return asked

    return answer


Hub = Callable[[Path | Exception], list[dict[str, Any]]]


def test_a_name_on_the_hub(tmp_path: Path, hub: Hub) -> None:
    asked = hub(write(tmp_path))
    checkpoint = resolve("owner/model", revision="v2", hf_token="hf_x", download_dir="/models")
    assert (checkpoint.model, checkpoint.path) == ("owner/model", str(tmp_path))
    (only,) = asked
    assert (only["name"], only["revision"], only["token"], only["cache_dir"]) == (
        "owner/model",
        "v2",
        "hf_x",
        "/models",
    )
    assert {"*.json", "*.safetensors", "*.jinja", "*.model"} <= set(only["allow_patterns"])
    assert not any("bin" in pattern for pattern in only["allow_patterns"])


def test_a_dummy_from_the_hub_fetches_no_weights(tmp_path: Path, hub: Hub) -> None:
    asked = hub(write(tmp_path))
    resolve("owner/model", load_format="dummy")
    assert "*.safetensors" not in asked[0]["allow_patterns"]


def http(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    """An error as the library raises it, without its response."""
    error = kind.__new__(kind)
    error.args = ("404 Client Error.\n\nSorry, we can't find the page.",)
    return error


@pytest.mark.parametrize(
    ("error", "code", "values"),
    [
        (http(errors.GatedRepoError), "gated-model", ("a/b", "https://", "/a/b", "--hf-token")),
        (http(errors.RepositoryNotFoundError), "no-such-model", ("'a/b'", "https://", "--hf-token")),
        (http(errors.RevisionNotFoundError), "no-such-revision", ("a/b", "'v1'", "https://")),
        (http(errors.HfHubHTTPError), "cannot-fetch-model", ("a/b", "v1", "https://", "404 Client Error.")),
        (errors.HFValidationError("no"), "not-a-model-name", ("'a/b'",)),
        (errors.LocalEntryNotFoundError("no"), "model-not-downloaded", ("a/b", "v1:", "https://")),
        (errors.OfflineModeIsEnabled("no"), "model-not-downloaded", ("a/b", "v1:")),
        (OSError(28, "No space left on device"), "disk-full", ("a/b",)),
        (RuntimeError(""), "cannot-fetch-model", ("a/b", "RuntimeError")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_hub_fails(hub: Hub, error: Exception, code: str, values: tuple[str, ...]) -> None:
    hub(error)
    fails("a/b", code, *values, revision="v1")
    with refuses(ModelError, code) as caught:
        resolve("a/b", revision="v1")
    # Not after the libraries' own tracebacks, a hundred lines of them.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself, told not to look further than its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fails("owner/model", "model-not-downloaded", "HF_HUB_OFFLINE", download_dir=str(tmp_path))
