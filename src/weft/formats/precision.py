"""Precision: how the numbers of a model are stored, and the exact bytes that its tensors take so.

`int8` and `int4` are GPTQ's and AWQ's layout: groups of 128 inputs, each with a 16-bit scale and a zero point, or what
the model's own checkpoint is in where that is one of theirs (`ModelShape.published`); `fp8` has 8-bit matrices, in
blocks of 128 x 128 with 32-bit scales where DeepSeek publishes them; `mxfp4` has a scale byte for 32 numbers, `nvfp4`
one for 16. In all of them embedding, head, router, norms and biases stay 16-bit. Scales that are one number for a whole
tensor are not counted. GGUF types are in `formats.gguf_types`.
"""

from __future__ import annotations

import re
from collections import Counter
from difflib import get_close_matches
from functools import lru_cache

import msgspec

from weft.architectures.axes import axis_length, owned
from weft.architectures.parameters import Parameter, Part, model_parameters
from weft.architectures.place import Place, Span, whole
from weft.architectures.published import ORDERED, ROW, PublishedQuantization
from weft.architectures.shape import DType, ModelShape
from weft.errors import ConfigError
from weft.formats import gguf_types
from weft.formats.schemes import ALL_SCHEMES, UNIT, scheme_for_parameter


class NumberFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`bits` per number, and `block_bytes` more for each block of `block_rows` x `block_cols` numbers."""

    bits: float
    block_rows: int = 1
    block_cols: int = 1
    block_bytes: float = 0

    def nbytes(self, rows: Span, cols: Span) -> int:
        """Bytes of these rows and columns of a matrix; a block that is cut takes all of its own bytes."""
        numbers = len(rows) * -(-len(cols) * self.bits // 8)
        return int(numbers + rows.blocks(self.block_rows) * cols.blocks(self.block_cols) * self.block_bytes)


BF16, FP32, FP8 = NumberFormat(bits=16), NumberFormat(bits=32), NumberFormat(bits=8)
FP8_BLOCKS = NumberFormat(bits=8, block_rows=128, block_cols=128, block_bytes=4)
INT8 = NumberFormat(bits=8, block_cols=128, block_bytes=3)
INT4 = NumberFormat(bits=4, block_cols=128, block_bytes=2.5)
MXFP4 = NumberFormat(bits=4, block_cols=32, block_bytes=1)
NVFP4 = NumberFormat(bits=4, block_cols=16, block_bytes=1)

# What the matrices are stored in; everything else as `OTHERS` says.
MATRICES = {
    "bf16": BF16,
    "fp16": BF16,
    "fp32": FP32,
    "fp8": FP8,
    "int8": INT8,
    "int4": INT4,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
OTHERS = {"fp32": FP32}
OF_DTYPE: dict[DType, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # that are not quantised
NAMES = (*MATRICES, *gguf_types.MIXES)
ALIASES = gguf_types.ALIASES | {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "float32": "fp32",
    "f32": "fp32",
    "float": "fp32",
    "fp4": "nvfp4",
    "awq": "int4",
    "gptq": "int4",
    "gptq-int4": "int4",
    "gptq-int8": "int8",
    "awq-int4": "int4",
    "w4a16": "int4",
    "w8a16": "int8",
    "4bit": "int4",
    "4-bit": "int4",
    "8bit": "int8",
    "8-bit": "int8",
    "mxfp4/fp8": "mxfp4",
}
# Where a format's published checkpoints leave the matrices of attention in 16 bits: gpt-oss in MXFP4
# (openai/gpt-oss-120b: quantization_config.modules_to_not_convert), DeepSeek in NVFP4 (nvidia/DeepSeek-R1-0528-NVFP4).
DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
ATTENTION_KEPT = {("mxfp4", "GptOssForCausalLM"), *(("nvfp4", name) for name in DEEPSEEK)}
LAYER = re.compile(r"\.(\d+)\.")  # its number, in the name of a tensor
# Published with FP8 in blocks with a scale each.
FP8_IN_BLOCKS = (*DEEPSEEK, "MiniMaxM2ForCausalLM")


def canonical(name: str) -> str:
    """The name of a precision as NAMES has it, from what people write. Raises ConfigError with the nearest."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in NAMES:
        return key
    near = get_close_matches(key, (*NAMES, *ALIASES), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"unknown precision {name!r}; {hint}known: {', '.join(NAMES)}")


def held_precision(precision: str) -> str:
    """What our own engine makes of a precision as it loads: of a GGUF file's types, and of what GPTQ and AWQ publish,
    what it has kernels for, and 16 bits of vectors. For `part_format` and what is summed of it."""
    return precision + gguf_types.HELD_SUFFIX if precision in (*gguf_types.MIXES, "int8", "int4") else precision


def own_quantization(shape: ModelShape, precision: str) -> PublishedQuantization | None:
    """How the model's own checkpoint has its weights, where the precision is that one's."""
    published = shape.published
    return published if published and published.precision == precision.removesuffix(gguf_types.HELD_SUFFIX) else None


@lru_cache(maxsize=256)
def similar_layers(shape: ModelShape, precision: str) -> tuple[int, ...]:
    """Of each layer, the first that has the same parameters, stored in the same way."""
    layers = range(shape.layers)
    if precision in gguf_types.BY_LAYER:
        return tuple(layers)
    published = own_quantization(shape, precision)
    left: dict[str, set[tuple[str, str]]] = {}
    for name, kind in published.exceptions if published else ():
        _, *layer = LAYER.split(name, maxsplit=1)
        if layer:
            left.setdefault(layer[0], set()).add((layer[1], kind))
    first: dict[tuple[bool, frozenset[tuple[str, str]]], int] = {}
    return tuple(
        first.setdefault((shape.has_experts(layer), frozenset(left.get(str(layer), ()))), layer) for layer in layers
    )


def part_format(shape: ModelShape, precision: str, parameter: Parameter, part: Part, layer: int) -> NumberFormat:
    """How one tensor of the model is stored; `precision` as `canonical` or `as_held` gives it."""
    held, precision = precision.endswith(gguf_types.HELD_SUFFIX), precision.removesuffix(gguf_types.HELD_SUFFIX)
    published = own_quantization(shape, precision)
    if held and (published or precision in gguf_types.MIXES):
        name = scheme_for_parameter(shape, precision, parameter, layer)
        if name is None:
            return BF16
        scheme = ALL_SCHEMES[name]
        return NumberFormat(bits=scheme.bits, block_cols=scheme.group, block_bytes=scheme.group_bits / 8)
    if published:
        return _published_format(published, parameter, part, layer)
    if precision in gguf_types.MIXES:
        kind = gguf_types.gguf_type(shape, precision, parameter, part, layer)
        return NumberFormat(bits=gguf_types.BITS[kind])
    if parameter.role not in ("linear", "expert") or part.cols is None:
        return OTHERS.get(precision, BF16)
    if ".attention." in parameter.name and (precision, shape.architecture) in ATTENTION_KEPT:
        return BF16
    if precision == "fp8" and shape.architecture in FP8_IN_BLOCKS:
        return FP8_BLOCKS
    if precision in ("int8", "int4") and axis_length(shape, part.cols) % UNIT:
        return BF16
    return MATRICES[precision]


def _published_format(published: PublishedQuantization, parameter: Parameter, part: Part, layer: int) -> NumberFormat:
    """As it lies in the file."""
    name = published.stored_as(part.source.format(layer=layer, expert=0), parameter.role).removesuffix(ORDERED)
    if name not in ALL_SCHEMES:
        return BF16
    scheme = ALL_SCHEMES[name]
    zero = 0 if scheme.lowest == "middle" else scheme.bits / 8
    return NumberFormat(bits=scheme.bits, block_cols=scheme.group, block_bytes=2 + zero)


def scale_columns(shape: ModelShape, precision: str) -> int:
    """Columns of a matrix of the model that share a scale; 1 where each number stands for itself."""
    precision = canonical(precision.removesuffix(gguf_types.HELD_SUFFIX))
    if precision == "fp8" and shape.architecture in FP8_IN_BLOCKS:
        return FP8_BLOCKS.block_cols
    if published := own_quantization(shape, precision):
        return published.group if published.group < ROW and published.scheme in ALL_SCHEMES else 1
    return MATRICES[precision].block_cols if precision in MATRICES else 1


def parameter_bytes(shape: ModelShape, precision: str, place: Place, parameter: Parameter, layer: int = 0) -> int:
    """Bytes of one parameter on this rank, in one layer where it belongs to layers, all its experts together."""
    total = 0
    for part in parameter.parts:
        rows = owned(shape, place, part.rows)
        cols = Span(0, 1) if part.cols is None else owned(shape, place, part.cols)
        total += part_format(shape, precision, parameter, part, layer).nbytes(rows, cols)
    return total * len(place.experts) if parameter.role == "expert" else total


class WeightBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's weights by kind. `linear` are the matrices of attention and of dense and shared MLPs;
    `others` norms, biases and routers."""

    embedding: int = 0
    linear: int = 0
    expert: int = 0
    head: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.expert + self.head + self.others


def weights_by_kind(shape: ModelShape, precision: str, place: Place | None = None) -> WeightBytes:
    """The weights of a rank, by default of the whole model, by kind. Raises ConfigError for an unknown precision.

    A tied head counts where it is stored: with the embedding, and again on a last stage without one.
    """
    return sum_by_kind(shape, canonical(precision), place or whole(shape))


def sum_by_kind(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    """The same; `precision` as `canonical` or `as_held` gives it."""
    # The first of those that are alike, and how many they are.
    layers = Counter(similar_layers(shape, precision)[place.layers.start : place.layers.stop])
    kinds = {"embedding": 0, "linear": 0, "expert": 0, "head": 0, "others": 0}
    for parameter in model_parameters(shape):
        kind = parameter.role if parameter.role in kinds else "others"
        if parameter.where == "layer":
            for layer, count in layers.items():
                if parameter.is_in(shape, layer):
                    kinds[kind] += count * parameter_bytes(shape, precision, place, parameter, layer)
        elif parameter.where == "embed":
            kinds[kind] += parameter_bytes(shape, precision, place, parameter) * place.first
        elif not (parameter.role == "head" and shape.tied and place.first):
            kinds[kind] += parameter_bytes(shape, precision, place, parameter) * place.last
    return WeightBytes(**kinds)


def weight_bytes(shape: ModelShape, precision: str, place: Place | None = None) -> int:
    """Bytes of a rank's weights, by default of the whole model's."""
    return weights_by_kind(shape, precision, place).total
