"""GGUF types: the bits of each, and which tensor gets which in the mixes that llama.cpp's `quantize` makes.

Source: ggml's block structs, and `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp (2025), for files made
without an importance matrix.
"""

from __future__ import annotations

from weft.architectures.axes import Axis, axis_length
from weft.architectures.parameters import Parameter, Part
from weft.architectures.shape import ModelShape
from weft.formats.gguf import SIZES

SUPERBLOCK = 256  # numbers along a row, of the types that end in K and of IQ4_XS
BLOCK = 32  # of the others
# What a tensor gets whose rows are no multiple of the super-block; of 2 and 3 bits IQ4_NL where llama.cpp is older.
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# A mix by its name, and the type of most of its tensors. Those with Q8_0 behind have it for what the head multiplies
# with, as llama.cpp's --output-tensor-type makes them.
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
}
# Behind a mix's name: its tensors as our own engine holds them (formats.schemes).
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
}
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
# Bits per number of each type, its scales included.
BITS = {name: 8 * size.nbytes / size.elements for name, size in SIZES.items()}
EIGHT_EXPERTS = 8  # Mixtral, for whose attention the mixes spend more
LAYERS_OF_70B = 80


def gguf_type(shape: ModelShape, mix: str, parameter: Parameter, part: Part, layer: int) -> str:
    """The GGUF type of one tensor in a mix of MIXES."""
    if part.cols is None or parameter.role == "router":
        return "F32"
    kind, cols = _wanted(shape, mix, parameter, part, layer), axis_length(shape, part.cols)
    if kind in FALLBACK and cols % SUPERBLOCK:
        kind = FALLBACK[kind]
    return "F16" if cols % BLOCK else kind


def _wanted(shape: ModelShape, mix: str, parameter: Parameter, part: Part, layer: int) -> str:
    base, layers = MIXES[mix], shape.layers
    name = parameter.name.removeprefix("layers.{layer}.").removesuffix(".weight")
    if parameter.role == "head" or (parameter.role == "embedding" and shape.tied and name == "embed"):
        return "Q8_0" if mix.endswith("q8_0") else "Q6_K"
    if name == "attention.qkv":
        fused = parameter.parts[0].source == parameter.parts[-1].source
        if fused:
            raised = {"q3_k_m": "Q4_K", "q3_k_l": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}
            return raised.get(mix, base)
        which = "q" if part.rows is Axis.Q else "v" if part is parameter.parts[2] else "k"
        return _attention(shape, mix, which, layer)
    if name == "attention.out":
        return _out(shape, mix)
    if name in ("mlp.down", "experts.down", "shared.down"):
        return _down(mix, layer, layers)
    return base


def _more_bits(layer: int, layers: int) -> bool:
    """The layers that the _M mixes spend more on: the first and last eighth, and each third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _attention(shape: ModelShape, mix: str, which: str, layer: int) -> str:
    """Of the query, key or value projection."""
    base = MIXES[mix]
    if which == "q":
        return base
    if shape.experts and shape.experts.count == EIGHT_EXPERTS:
        return "Q8_0"
    if which == "k":
        return base
    grouped = shape.group >= 4
    match mix:
        case "q2_k":
            kind = "Q4_K" if grouped else "Q3_K"
        case "q3_k_m":
            kind = "Q5_K" if layer < 2 else "Q4_K"
        case "q3_k_l":
            kind = "Q5_K"
        case "iq4_nl" | "iq4_xs" if grouped:
            kind = "Q5_K"
        case "q4_k_m" | "q5_k_m" if _more_bits(layer, shape.layers):
            kind = "Q6_K"
        case "q4_k_s" if layer < 4:
            kind = "Q5_K"
        case _:
            kind = base
    is_70b = shape.layers == LAYERS_OF_70B and shape.group > 1
    return "Q5_K" if is_70b and kind in ("Q3_K", "Q4_K") else kind


def _out(shape: ModelShape, mix: str) -> str:
    """Of the projection after attention."""
    if shape.experts and shape.experts.count == EIGHT_EXPERTS:
        few = ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "iq4_xs", "q4_k_s", "q4_k_m")
        return "Q5_K" if mix in few else MIXES[mix]
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mix, MIXES[mix])


def _down(mix: str, layer: int, layers: int) -> str:
    """Of the MLP's way back."""
    early = layer < layers // 8
    match mix:
        case "q2_k":
            return "Q3_K"
        case "q3_k_m":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "q3_k_l":
            return "Q5_K"
        case "q4_k_m" | "q5_k_m" if _more_bits(layer, layers):
            return "Q6_K"
        case "iq4_nl" | "iq4_xs" | "q4_k_s" if early:
            return "Q5_K"
    return MIXES[mix]
