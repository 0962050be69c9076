"""GGUF files of models with experts and with windows compute what Transformers computes from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.cpu import checkpoints
from tests.pure.gguf_files import GGML, ggml_name, interleave, interleaved_dim, metadata_of, stacked, write
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.shape import LatentAttention, ModelShape
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.config import config_json
from weft.errors import ModelError

pytestmark = pytest.mark.usefixtures("small_caches")

PROMPT, NEW = list(range(3, 60)), 12


def one_by_one(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with gpt-oss's stacks divided: an expert's matrices [outputs, inputs] and biases, gate and up apart."""
    out = {}
    for name, value in tensors.items():
        prefix, found, part = name.rpartition("mlp.experts.")
        if not found or part[0].isdigit():
            out[name] = value
            continue
        kind = "bias" if part.endswith("_bias") else "weight"
        for expert, block in enumerate(value if kind == "bias" else value.swapaxes(1, 2)):
            names = ("gate_proj", "up_proj") if part.startswith("gate_up") else ("down_proj",)
            for turn, module in enumerate(names):
                out[f"{prefix}mlp.experts.{expert}.{module}.{kind}"] = block[turn :: len(names)]
    return out


def ggml_tensors(tensors: Mapping[str, np.ndarray], shape: ModelShape) -> dict[str, np.ndarray]:
    """Tensors as llama.cpp's converter writes them: experts in stacks, the offset of norms added to their weights."""
    pairs = []
    for name, value in sorted(one_by_one(tensors).items(), key=lambda item: expert_number(item[0])):
        moved = interleaved_dim(name, shape)
        value = interleave(value, moved) if moved else value
        own = ggml_name(name, shape.architecture)
        pairs.append((own, (value + shape.norm.offset if "norm" in own else value).squeeze()))
    return stacked(pairs)  # type: ignore[return-value]


def expert_number(name: str) -> int:
    _, found, end = name.partition(".experts.")
    return int(end.partition(".")[0]) if found else -1


def old_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as old converters wrote them, each expert's by itself."""
    out = {}
    for name, value in tensors.items():
        module, found, kind = name.partition("_exps.")
        if found:
            out |= {f"{module}.{expert}.{kind}": block for expert, block in enumerate(value)}
        else:
            out[name] = value
    return out


def split_heads(tensors: Mapping[str, np.ndarray], shape: ModelShape) -> dict[str, np.ndarray]:
    """Tensors as new converters write those of DeepSeek: keys' projections, transposed, and values' apart."""
    out = {}
    for name, value in tensors.items():
        module, found, _ = name.partition("attn_kv_b")
        if found and isinstance(latent := shape.mixers[0], LatentAttention):
            heads = value.reshape(shape.q_heads, -1, latent.kv_lora_rank)
            keys, values = np.split(heads, [latent.nope_dim], axis=1)
            out |= {module + "attn_k_b.weight": keys.swapaxes(1, 2).copy(), module + "attn_v_b.weight": values.copy()}
        else:
            out[name] = value
    return out


def convert(folder: Path, more: Mapping[str, Any], *, old: bool = False) -> Path:
    shape = config_json.read_shape(folder)
    arch = GGML[shape.architecture]
    metadata = metadata_of(shape) | {f"{arch}.{key}": value for key, value in more.items()}
    tensors = ggml_tensors(load_file(folder / "model.safetensors"), shape)
    rope = shape.mixers[0].rope
    if rope.kind == "longrope":
        tensors |= {
            "rope_factors_short.weight": np.array(rope.short_factors, np.float32),
            "rope_factors_long.weight": np.array(rope.long_factors, np.float32),
        }
    if "attention.key_length_mla" in more:
        tensors = split_heads(tensors, shape)
    return write(folder / "model.gguf", arch, metadata, old_experts(tensors) if old else tensors)


WINDOW = {"attention.sliding_window": 9, "rope.freq_base": 1e6}
# Lengths of cached vectors beside those of heads, in files with keys' and values' projections apart.
APART = {
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 10,
}
CASES = {
    "qwen3-moe-gguf": {},
    "qwen2-moe-gguf": {},
    "mixtral": {},
    "gpt-oss-gguf": {},
    "gemma3-gguf": WINDOW,
    "phi3-longrope": {},
    "deepseek-v2-gguf": {},
    "deepseek-v3-gguf": APART,
}


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", CASES)
@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_tokens_equal(tmp_path: Path, recipe: str, layout: dict[str, Any]) -> None:
    folder = checkpoints.make(recipe, tmp_path)
    assert tokens_of(convert(folder, CASES[recipe]), **layout) == truth_of(folder)


def test_old_files_have_a_tensor_per_expert(tmp_path: Path) -> None:
    folder = checkpoints.make("mixtral", tmp_path)
    assert tokens_of(convert(folder, {}, old=True)) == truth_of(folder)


@pytest.mark.parametrize("count", [5, 7])
def test_a_stack_of_another_number_of_experts(tmp_path: Path, count: int) -> None:
    path = convert(checkpoints.make("mixtral", tmp_path), {"expert_count": count})
    with refuses(ModelError, "tensor-of-other-dims", path, "ffn_gate_exps", [6, 96, 48], [count, 96, 48]):
        resolve(str(path))


def test_a_missing_stack(tmp_path: Path) -> None:
    folder = checkpoints.make("gpt-oss-gguf", tmp_path)
    shape = config_json.read_shape(folder)
    tensors = ggml_tensors(load_file(folder / "model.safetensors"), shape)
    for name, dims in {"blk.1.ffn_up_exps.weight": [6, 96, 48], "blk.3.attn_sinks.weight": [6]}.items():
        rest = {own: value for own, value in tensors.items() if own != name}
        path = write(tmp_path / "rest.gguf", "gpt-oss", metadata_of(shape), rest)
        with refuses(ModelError, "missing-tensor", path, name, dims):
            resolve(str(path))


def tokens_of(path: Path, **layout: Any) -> list[int]:
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **layout) as llm:
        output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))[0]
    tokens: list[int] = output.outputs[0].token_ids
    return tokens


def truth_of(folder: Path) -> list[int]:
    """Transformers' greedy continuation of PROMPT."""
    model = checkpoints.reference(folder)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens
