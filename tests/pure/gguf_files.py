"""Small GGUF files, written by the gguf library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from weft.checkpoint.architectures.registry import ARCHITECTURES, find_architecture
from weft.checkpoint.architectures.shape import LatentAttention, ModelShape
from weft.checkpoint.files.tensor import ENCODINGS
from weft.checkpoint.gguf.names import layer_modules, outer_modules
from weft.checkpoint.tensor_index import expected_tensors

GGML = {name: known.gguf for name, known in ARCHITECTURES.items() if known.gguf}
GGML |= {"MixtralForCausalLM": "llama", "DeepseekV3ForCausalLM": "deepseek2"}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


class Stored:
    """Bytes as they shall lie in the file: [rows, bytes of a row]."""

    def __init__(self, data: np.ndarray, type: str) -> None:
        self.data, self.type = data, type


def write(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Stored]) -> Path:
    """Ints become uint32 (NumPy's int32 stay so), floats float32; lists keep what their elements are."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case np.int32():
                writer.add_int32(key, int(value))
            case _:
                writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, Stored):
            writer.add_tensor(name, value.data, raw_dtype=gguf.GGMLQuantizationType[value.type])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ggml_name(name: str, architecture: str = "LlamaForCausalLM") -> str:
    """ggml's name of one of Hugging Face's tensors; of a parameter of an expert, that of the stack of all experts."""
    names = find_architecture(architecture).names
    own = {theirs: ours for ours, theirs in (outer_modules(names) | layer_modules(names)).items()}
    if name.endswith(names.sinks or "no sinks"):
        name += ".weight"
    if name.endswith(names.correction or "no correction"):
        name += ".bias"
    module, kind = EXPERT.sub("{expert}", name).rsplit(".", 1)
    layer = LAYER.fullmatch(module)
    return f"blk.{layer[1]}.{own[layer[2]]}.{kind}" if layer else f"{own[module]}.{kind}"


def stacked(tensors: Sequence[tuple[str, np.ndarray | Stored]]) -> dict[str, np.ndarray | Stored]:
    """Tensors by name, with those of one name, the experts', stacked in their order."""
    groups: dict[str, list[np.ndarray | Stored]] = {}
    for name, value in tensors:
        groups.setdefault(name, []).append(value)
    return {name: stack(values) if "_exps." in name else values[-1] for name, values in groups.items()}


def stack(values: Sequence[np.ndarray | Stored]) -> np.ndarray | Stored:
    blocks = [value.data if isinstance(value, Stored) else value for value in values]
    return Stored(np.stack(blocks), values[0].type) if isinstance(values[0], Stored) else np.stack(blocks)


def metadata_of(shape: ModelShape) -> dict[str, Any]:
    """Metadata that llama.cpp's converter writes for a shape."""
    arch = GGML[shape.architecture]
    values = {
        "block_count": len(shape.layers),
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn or (shape.experts.width if shape.experts else 0),
        "attention.head_count": shape.q_heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.mixers[0].head_dim,
        "attention.value_length": shape.mixers[0].head_dim,
        "attention.layer_norm_rms_epsilon": shape.norm.eps,
        "rope.freq_base": shape.mixers[0].rope.theta,
        "rope.dimension_count": shape.mixers[0].rope.rotated_dims(shape.mixers[0].head_dim),
    }
    if shape.experts:
        values |= {
            "expert_count": shape.experts.count,
            "expert_used_count": shape.experts.top_k,
            "expert_feed_forward_length": shape.experts.width,
        }
        if shape.experts.shared_gate:
            values["expert_shared_feed_forward_length"] = shape.experts.shared_width
    if isinstance(shape.mixers[0], LatentAttention):
        values |= _latent_metadata(shape, shape.mixers[0])
    window = next((layer.window for layer in shape.layers if layer.window), None)
    if window:
        values["attention.sliding_window"] = window
    rope = shape.mixers[0].rope
    if rope.kind == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_max_positions,
        }
    if rope.kind == "longrope":
        values |= {
            "rope.scaling.attn_factor": rope.attention_factor,
            "rope.scaling.original_context_length": rope.original_max_positions,
        }
    return {f"{arch}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(shape.vocab)]
    }


def _latent_metadata(shape: ModelShape, latent: LatentAttention) -> dict[str, Any]:
    """Metadata of DeepSeek's models, of files with attn_kv_b."""
    experts, known = shape.experts, find_architecture(shape.architecture).config
    assert experts
    values: dict[str, Any] = {
        "attention.kv_lora_rank": latent.kv_lora_rank,
        "attention.key_length": latent.head_dim,
        "attention.value_length": latent.v_dim,
        "rope.dimension_count": latent.rope_dim,
        "leading_dense_block_count": sum(not layer.has_experts for layer in shape.layers),
        "expert_shared_count": experts.shared,
        "expert_weights_scale": experts.scaling,
        "expert_weights_norm": experts.normalised,
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.top_groups,
        "expert_gating_func": 1 if known.model_type == "deepseek_v2" else 2,
    }
    if latent.q_lora_rank:
        values["attention.q_lora_rank"] = latent.q_lora_rank
    if latent.rope.mscale_all_dim:
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * latent.rope.mscale_all_dim
    return values


def interleaved_dim(name: str, shape: ModelShape) -> int:
    """Length of the heads of a matrix, by Hugging Face's name, whose rows are in ggml's rotary order in a file; 0 for
    other tensors."""
    match = re.search(r"\.(\d+)\.self_attn\.[qk]_proj\.", name)
    if match is None or not find_architecture(shape.architecture).gguf_interleaved:
        return 0
    return shape.layers[int(match[1])].mixer.head_dim


def interleave(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows in ggml's rotary order: in each head, the i-th of the first half, then the i-th of the second."""
    rows = np.arange(len(values)).reshape(-1, head_dim)
    half = head_dim // 2
    order = [head[i // 2 + half * (i % 2)] for head in rows for i in range(head_dim)]
    return values[order]


# Where a block of a type has its scale, and its minimum or the scale of its minima; 0 and nothing where it is not here.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,)}


def random_blocks(rng: np.random.Generator, rows: int, cols: int, type: str) -> np.ndarray:
    """Random bytes of a quantised type, its scales neither NaN nor infinite."""
    if type == "MXFP4":
        return mxfp4_blocks(rng, rows, cols)
    encoding = ENCODINGS[type]
    blocks = rng.integers(0, 256, (rows, cols // encoding.elements, encoding.nbytes), dtype=np.uint8)
    for at in HALVES.get(type, (0,)):
        blocks[..., at + 1] &= 0xBB  # leaves a bit of a half's exponent unset
    return blocks.reshape(rows, -1)


def mxfp4_blocks(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Random bytes of MXFP4, with scales from 2^-6 to 2^-4: numbers of a standard deviation of 0.1."""
    blocks = rng.integers(0, 256, (rows, cols // 32, 17), dtype=np.uint8)
    blocks[..., 0] = 121 + blocks[..., 0] % 3
    return blocks.reshape(rows, -1)


def weight_blocks(rng: np.random.Generator, rows: int, cols: int, type: str, std: float) -> np.ndarray:
    """The same of numbers as weights are: around zero, with this standard deviation."""
    if type == "MXFP4":
        return mxfp4_blocks(rng, rows, cols)
    encoding, blocks = ENCODINGS[type], random_blocks(rng, rows, cols, type)
    # Of types with minima these are what lies in the middle of q, of which types of blocks in K take away.
    middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(type, 0.0)
    times = 1.0
    for _ in range(2):
        for at, factor in zip(HALVES.get(type, (0,)), (1.0, middle), strict=False):
            half = np.array([factor * times], dtype=np.float16).view(np.uint8)
            blocks.reshape(rows, -1, encoding.nbytes)[..., at : at + 2] = half
        times *= std / gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type]).std()
    return blocks


def write_model(
    path: Path,
    shape: ModelShape,
    type: str = "F32",
    seed: int = 0,
    others: Mapping[str, str] | None = None,
    std: float | None = None,
) -> dict[str, np.ndarray]:
    """A whole model with matrices of `type`, but for `others` by the last part of their names or the whole of it, with
    random bytes or made for a standard deviation; its values as float32 under Hugging Face's names, in their order."""
    rng = np.random.default_rng(seed)
    usual, truth, stored = type, {}, list[tuple[str, np.ndarray | Stored]]()
    for name, dims in expected_tensors(shape):
        others = others or {}
        type = others.get(name) or others.get(name.split(".")[-2], usual)
        ggml_type = gguf.GGMLQuantizationType[type]
        moved = interleaved_dim(name, shape)
        values = rng.standard_normal(dims, dtype=np.float32) * np.float32(std or 1)
        data: np.ndarray | Stored = interleave(values, moved) if moved else values
        if len(dims) == 2 and type != "F32":
            quantised = type not in ("F16", "BF16")
            if quantised:
                packed = weight_blocks(rng, *dims, type, std) if std else random_blocks(rng, *dims, type)
            else:
                packed = gguf.quants.quantize(values, ggml_type)
            values = gguf.quants.dequantize(packed, ggml_type)
            data = Stored(interleave(packed, moved) if moved else packed, type)
        truth[name] = values
        stored.append((ggml_name(name, shape.architecture), data))
    write(path, GGML[shape.architecture], metadata_of(shape), stacked(stored))
    return truth
