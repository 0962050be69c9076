"""GGUF types: bits of each type, and the type of each tensor in the mixes that llama.cpp's `quantize` makes.

Source: ggml's block structs, and `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp (2025), for files made
without an importance matrix.
"""

from __future__ import annotations

from weft.checkpoint.architectures.parameters import Parameter, Part
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.gguf import SIZES

SUPERBLOCK = 256  # numbers along a row in the types that end in K and in IQ4_XS
BLOCK = 32  # in all other types
# Types in place of types with super-blocks, if the rows are no multiple of a super-block. Older llama.cpp has IQ4_NL
# for 2 and 3 bits.
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Each mix, and the type of most of its tensors; in mxfp4_moe experts are in MXFP4. In a mix that ends in +q8_0 the
# matrix of the head is in Q8_0, as with llama.cpp's --output-tensor-type.
MIXES = {
    "q2_k": "Q2_K",
    "q3_k_s": "Q3_K",
    "q3_k_m": "Q3_K",
    "q3_k_l": "Q3_K",
    "iq4_xs": "IQ4_XS",
    "iq4_nl": "IQ4_NL",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q4_0+q8_0": "Q4_0",
    "q4_1+q8_0": "Q4_1",
    "q4_k_s": "Q4_K",
    "q4_k_m": "Q4_K",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
    "q5_k_s": "Q5_K",
    "q5_k_m": "Q5_K",
    "q6_k": "Q6_K",
    "q8_0": "Q8_0",
    "mxfp4_moe": "Q8_0",
}
# Suffix of a precision's name: its tensors as Weft's engine holds them (formats.schemes).
HELD_SUFFIX = " held"
# Mixes in which layers differ.
BY_LAYER = tuple(
    mix + end for mix in ("q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "iq4_nl", "iq4_xs") for end in ("", HELD_SUFFIX)
)
# `general.file_type` of a GGUF file. Source: enum llama_ftype of llama.cpp's llama.h.
FILE_TYPES = {
    0: "fp32",
    1: "fp16",
    2: "q4_0",
    3: "q4_1",
    7: "q8_0",
    8: "q5_0",
    9: "q5_1",
    10: "q2_k",
    11: "q3_k_s",
    12: "q3_k_m",
    13: "q3_k_l",
    14: "q4_k_s",
    15: "q4_k_m",
    16: "q5_k_s",
    17: "q5_k_m",
    18: "q6_k",
    25: "iq4_nl",
    30: "iq4_xs",
    32: "bf16",
    38: "mxfp4_moe",
}
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
# A number of bits alone: the file that Ollama and most repositories offer first.
ALIASES |= {"q2": "q2_k", "q3": "q3_k_m", "q4": "q4_k_m", "q5": "q5_k_m", "q6": "q6_k", "q8": "q8_0"}
# Bits per number of each type, with its scales.
BITS = {name: 8 * size.nbytes / size.elements for name, size in SIZES.items()}
EIGHT_EXPERTS = 8  # Mixtral: the mixes spend more bits on its attention
LAYERS_OF_70B = 80


def gguf_type(shape: ModelShape, mix: str, parameter: Parameter, part: Part, layer: int) -> str:
    """GGUF type of one tensor in a mix of MIXES."""
    if part.cols is None or parameter.role == "router":
        return "F32"
    type, cols = _mix_type(shape, mix, parameter, part, layer), part.cols.length
    if type in FALLBACK and cols % SUPERBLOCK:
        type = FALLBACK[type]
    return "F16" if cols % BLOCK else type


def _mix_type(shape: ModelShape, mix: str, parameter: Parameter, part: Part, layer: int) -> str:
    """Type of a matrix in a mix, whatever the length of its rows."""
    base, layers = MIXES[mix], len(shape.layers)
    name = parameter.name.removeprefix("layers.{layer}.").removesuffix(".weight")
    is_tied_head = parameter.role == "embedding" and shape.tied and name == "embed"
    if mix == "mxfp4_moe":
        return "MXFP4" if parameter.role == "expert" else base
    if parameter.role == "head" or is_tied_head:
        return "Q8_0" if mix.endswith("q8_0") else "Q6_K"
    if name == "attention.qkv":
        return _qkv_type(shape, mix, parameter, part, layer)
    if name == "attention.out":
        return _out_type(shape, mix)
    if name in ("mlp.down", "experts.down", "shared.down"):
        return _down_type(mix, layer, layers)
    return base


def _gets_more_bits(layer: int, layers: int) -> bool:
    """Return True for the layers that the _M mixes spend more on: first and last eighth, and each third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _qkv_type(shape: ModelShape, mix: str, parameter: Parameter, part: Part, layer: int) -> str:
    """Type of a query, key or value projection, or of the tensor that holds all three."""
    fused = parameter.parts[0].source == parameter.parts[-1].source
    if fused:
        return {"q3_k_m": "Q4_K", "q3_k_l": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}.get(mix, MIXES[mix])
    if part.rows.cut == "q_heads":
        return MIXES[mix]
    return _kv_type(shape, mix, part is parameter.parts[2], layer)


def _kv_type(shape: ModelShape, mix: str, is_value: bool, layer: int) -> str:
    """Type of a key or value projection."""
    if shape.experts and shape.experts.count == EIGHT_EXPERTS:
        return "Q8_0"
    if not is_value:
        return MIXES[mix]
    group = shape.layers[layer].mixer.group
    type = _value_type(mix, layer, len(shape.layers), grouped=group >= 4)
    is_70b = len(shape.layers) == LAYERS_OF_70B and group > 1
    return "Q5_K" if is_70b and type in ("Q3_K", "Q4_K") else type


def _value_type(mix: str, layer: int, layers: int, *, grouped: bool) -> str:
    """Type of a value projection; `grouped`: there are at least 4 query heads per KV head."""
    match mix:
        case "q2_k":
            return "Q4_K" if grouped else "Q3_K"
        case "q3_k_m":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "q3_k_l":
            return "Q5_K"
        case "iq4_nl" | "iq4_xs" if grouped:
            return "Q5_K"
        case "q4_k_m" | "q5_k_m" if _gets_more_bits(layer, layers):
            return "Q6_K"
        case "q4_k_s" if layer < 4:
            return "Q5_K"
    return MIXES[mix]


def _out_type(shape: ModelShape, mix: str) -> str:
    """Type of attention's output projection."""
    if shape.experts and shape.experts.count == EIGHT_EXPERTS:
        raised = ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "iq4_xs", "q4_k_s", "q4_k_m")
        return "Q5_K" if mix in raised else MIXES[mix]
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mix, MIXES[mix])


def _down_type(mix: str, layer: int, layers: int) -> str:
    """Type of the MLP's down projection."""
    early = layer < layers // 8
    match mix:
        case "q2_k":
            return "Q3_K"
        case "q3_k_m":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "q3_k_l":
            return "Q5_K"
        case "q4_k_m" | "q5_k_m" if _gets_more_bits(layer, layers):
            return "Q6_K"
        case "iq4_nl" | "iq4_xs" | "q4_k_s" if early:
            return "Q5_K"
    return MIXES[mix]
