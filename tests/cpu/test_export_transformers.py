"""The script of weft plan --emit transformers: its device map is the model's, and it answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.cpu import tiny
from tests.pure.exports import emit
from weft.checkpoint.lookup import look_up

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, "head_dim": 8},
    "phi3": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 4, "head_dim": 8},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1},
    "opt": {
        "vocab_size": 64,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}


def script(model: Path, hardware: str) -> dict[str, Any]:
    """Definitions of the script, which is not run."""
    status, written, err = emit("transformers", f"{model} {hardware}")
    assert status == 0, err
    defined: dict[str, Any] = {"__name__": "plan"}
    exec(compile(written, "transformers_plan.py", "exec"), defined)
    return defined


def holder(device_map: dict[str, Any], parameter: str) -> Any:
    """The device of a parameter: that of the nearest module around it."""
    words = parameter.split(".")
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next(device_map[name] for name in names if name in device_map)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_has_its_gpu(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = {**config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(described, default=str))
    shape = look_up(str(tmp_path)).shape
    device_map = script(tmp_path, "--gpus 2xRTX4090 --pipeline-split 3,1")["DEVICE_MAP"]
    modules = dict(model.named_modules())
    assert device_map.keys() <= modules.keys()
    # Tied weights are told once.
    for name, _ in model.named_parameters():
        place = holder(device_map, name)
        number = next((int(word) for word in name.split(".") if word.isdecimal()), None)
        if (number is not None and "layers." in name) or ".h." in name:
            assert place == (0 if number < 3 else 1), name
    assert holder(device_map, "lm_head.weight") == (0 if shape.tied else 1)


def test_one_gpu_needs_no_names(tmp_path: Path) -> None:
    tiny.write(tmp_path / "tiny")
    assert script(tmp_path / "tiny", "--gpus 1xRTX4090")["DEVICE_MAP"] == {"": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights and a tokeniser."""
    folder = tmp_path_factory.mktemp("export") / "tiny"
    torch.manual_seed(0)
    values = {
        name: value for name, value in tiny.CONFIG.items() if name not in ("architectures", "model_type", "dtype")
    }
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
    config = (folder / "config.json").read_text()
    tiny.write(folder)
    (folder / "config.json").write_text(config)
    return folder


def test_the_script_answers_with_its_map_on_the_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = script(model, "--gpus 2xRTX4090 -pp 2")
    assert set(plan["DEVICE_MAP"].values()) == {0, 1} and plan["MAX_MEMORY"].keys() == {0, 1}
    plan["DEVICE_MAP"] = dict.fromkeys(plan["DEVICE_MAP"], "cpu")
    monkeypatch.setattr(sys, "argv", ["transformers_plan.py", "abc", "--max-new-tokens", "5"])
    plan["main"]()
    with torch.inference_mode():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        whole = AutoModelForCausalLM.from_pretrained(model)
        expected = whole.generate(**inputs, max_new_tokens=5)[0, inputs["input_ids"].shape[1] :]
    assert capsys.readouterr().out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_on_this_machine_s_cpu_it_runs_as_it_is(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = script(model, "")
    assert plan["DEVICE_MAP"] == {"": "cpu"}
    monkeypatch.setattr(sys, "argv", ["transformers_plan.py", "abc", "--max-new-tokens", "2"])
    plan["main"]()
    assert capsys.readouterr().out.endswith("\n")
