"""Limits on the claims of a checkpoint before anything grows with them, and on foreign text in errors."""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.checkpoint.test_config_json import LLAMA, shape
from tests.pure.machines import plan
from tests.refusals import refuses
from weft import logs
from weft.checkpoint.config import config_json, pooling
from weft.checkpoint.files import gguf, limits, safetensors
from weft.cli.dispatch import dispatch
from weft.engine.templates import template
from weft.engine.text import folder
from weft.errors import ConfigError, ModelError, RequestError, WeftError, printable
from weft.machine.hardware import cluster, quantities
from weft.plan.memory import capacity_lines
from weft.plan.plan import named_devices
from weft.planner.report import plan_file


@pytest.mark.parametrize(
    ("claim", "most"),
    [
        ({"num_hidden_layers": 10**9}, "10,000"),
        ({"max_position_embeddings": 10**15}, "100,000,000"),
        ({"num_local_experts": 10**9, "num_experts_per_tok": 2}, "100,000"),
    ],
)
def test_a_config_beyond_any_model_is_refused(claim: dict[str, Any], most: str) -> None:
    name, value = next(iter(claim.items()))
    with refuses(ModelError, "wrong-field-value", name, value, most):
        shape(LLAMA | claim)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_and_a_device_are_no_files(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with refuses(ModelError, "not-a-regular-file", name):
        if name == "config.json":
            config_json.read_shape(tmp_path)
        elif name == "model.safetensors":
            safetensors.read_directory(tmp_path)
        elif name == "tokenizer.json":
            folder.read_folder(tmp_path)
        else:
            folder._json(path)


def test_a_file_beyond_any_of_its_kind_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(limits.TOKENIZER_BYTES + 1)
    with refuses(ModelError, "file-too-large", "1,000,000,001", "1,000,000,000"):
        folder.read_folder(tmp_path)


def test_a_name_that_is_there_twice_is_told(tmp_path: Path) -> None:
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with refuses(ModelError, "key-twice-in-json", "model.safetensors", "'a'"):
        safetensors.read_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-1] + ', "vocab_size": 7}')
    with refuses(ModelError, "key-twice-in-json", "config.json", "'vocab_size'"):
        config_json.read_shape(tmp_path)


def test_a_template_that_is_nested_too_deeply() -> None:
    with refuses(ModelError, "chat-template-nested-too-deeply"):
        template._compile("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


# --- what is shown of it ---

ESCAPES = "\x1b]0;owned\x07\x1b[2Jmodel\u202e\x9b1m"


@pytest.mark.parametrize("error", [ConfigError, ModelError, RequestError])
def test_errors_show_no_control_characters(error: type[WeftError]) -> None:
    assert str(error(f"no {ESCAPES}", code="x")) == r"no \x1b]0;owned\x07\x1b[2Jmodel\u202e\x9b1m"
    assert str(error("Größe: 模型 🙂\n\tx", code="x")) == "Größe: 模型 🙂\n\tx"
    assert printable("\udc80") == r"\udc80"


def test_the_command_line_and_the_log_show_none_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["plan", ESCAPES, "--gpus", "1xH100"], [ESCAPES], ["serve", f"--{ESCAPES}"]):
        assert dispatch(words) > 0
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(capsys.readouterr().err), words
    record = logging.LogRecord("weft", logging.WARNING, "x", 1, "name %s", (ESCAPES,), None)
    assert "\x1b" not in logs.Printable("%(message)s").format(record)


@pytest.mark.parametrize("gpus", ["２xH100", "٣xH100", "2x２xH100"])
def test_digits_are_those_of_ascii(gpus: str) -> None:
    with refuses(ConfigError, "unknown-gpu"):
        cluster.parse_cluster(gpus)
    with refuses(ConfigError, "bad-network-speed"):
        quantities.parse_rate("１００Gb", "network")


def test_the_cache_of_a_cpu_is_not_a_gpu_s() -> None:
    on_gpu = msgspec.structs.replace(plan(), devices=named_devices(*("cuda:0",) * len(plan().devices)))
    on_cpu = msgspec.structs.replace(plan(), devices=named_devices(*("cpu",) * len(plan().devices)))
    assert capacity_lines(on_gpu, 1000)[0] == "GPU KV cache size: 16,000 tokens"
    assert capacity_lines(on_cpu, 1000)[0] == "CPU KV cache size: 16,000 tokens"


# --- Counts and lengths


def _header(entries: dict[str, dict[str, Any]]) -> bytes:
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("name", "shape"), [("x" * 513, [1]), ("a", [1] * 9), ("a", [0] * 5000), ("x" * 50_000, []), ("a\n", [1])], ids=str
)
def test_a_tensor_like_no_other_is_told_in_a_short_line(name: str, shape: list[int]) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 if 0 not in shape else 0]}
    with refuses(ModelError, "impossible-tensor", "a.safetensors") as refused:
        safetensors.decode_header(_header({name: entry}), "a.safetensors")
    assert len(str(refused.value)) < 300


def test_a_line_break_in_a_file_does_not_break_an_error(tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "a\nweft: all is well"}}
    with refuses(ModelError, "wrong-field-value", "quant_method", "a\\nweft"):
        shape(config)


def test_more_tensors_than_any_checkpoint_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "TENSORS", 10)
    monkeypatch.setattr(limits, "GGUF_FIELDS", 10)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    with refuses(ModelError, "too-many-tensors", "a.safetensors", "11", "10"):
        safetensors.decode_header(_header({str(number): entry for number in range(11)}), "a.safetensors")
    index = {"weight_map": {str(number): "a.safetensors" for number in range(11)}}
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    with refuses(ModelError, "too-many-tensors", safetensors.INDEX, "11", "10"):
        safetensors.read_directory(tmp_path)
    path = tmp_path / "a.gguf"
    for counts, code in (((11, 0), "too-many-tensors"), ((0, 11), "too-many-gguf-fields")):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(1000))
        with refuses(ModelError, code, "a.gguf", "11", "10"):
            gguf.read_gguf(path)


def test_texts_of_a_header_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    monkeypatch.setattr(limits, "GGUF_TEXT_BYTES", 100)
    monkeypatch.setattr(limits, "GGUF_TEXTS", 10)
    for value in (struct.pack("<IQ", 8, 200) + bytes(200), struct.pack("<IIQ", 9, 8, 11) + bytes(88)):
        path.write_bytes(head + struct.pack("<Q", 1) + b"a" + value)
        with refuses(ModelError, "too-many-gguf-texts", "a.gguf"):
            gguf.read_gguf(path)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "vocab_size", "head_dim"])
def test_a_number_beyond_any_is_refused(field: str) -> None:
    with refuses(ModelError, "wrong-field-value", field):
        shape(LLAMA | {field: 2**70})


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a":' + "[" * 100_000])
def test_json_that_is_nested_deeply_is_told(text: str, tmp_path: Path) -> None:
    for name in ("config.json", safetensors.INDEX, "modules.json"):
        (tmp_path / name).write_text(text)
    with refuses(ModelError, "damaged-config", "config.json"):
        config_json.load_config(tmp_path)
    with refuses(ModelError, "damaged-index", safetensors.INDEX):
        safetensors.read_directory(tmp_path)
    with refuses(ModelError, "damaged-config", "modules.json"):
        pooling._modules(tmp_path)
    with refuses(ModelError, "damaged-safetensors-header", "a.safetensors"):
        safetensors.decode_header(text.encode(), "a.safetensors")
    with refuses(ConfigError, "plan-not-json", "config.json"):
        plan_file.load_plan_file(str(tmp_path / "config.json"))
