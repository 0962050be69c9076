"""Precisions: the storage of a model's weights, and the exact bytes that its tensors take.

- `int8`, `int4`: GPTQ's and AWQ's layout, groups of 128 inputs with a 16-bit scale and a zero point each. If the
  model's own checkpoint is quantised to this precision (`ModelShape.published`), its layout.
- `fp8`: 8-bit matrices; for architectures that are published so, in blocks of 128 x 128 with 32-bit scales. The engine
  repeats the scales for each row (`checkpoint.quantised.schemes.FP8_SCHEMES`).
- `mxfp4`, `nvfp4`: 4-bit matrices with a scale byte per 32 or 16 numbers.

In all of these the embedding, head, router, norms and biases stay in 16 bits. A single scale for a whole tensor is not
counted. GGUF types are in `checkpoint.files.gguf_types`.
"""

from __future__ import annotations

import re
from collections import Counter
from difflib import get_close_matches
from functools import lru_cache

import msgspec

from weft.checkpoint.architectures.parameters import (
    Parameter,
    Part,
    is_held_outside_layers,
    layer_parameters,
    outer_parameters,
)
from weft.checkpoint.architectures.place import Place, Span, whole
from weft.checkpoint.architectures.published import ORDERED, ROW, PublishedQuantization
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import DType, LayerSpec, ModelShape
from weft.checkpoint.files import gguf_types
from weft.checkpoint.quantised.registry import FORMAT_ALIASES
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, UNIT, WIDE_SCHEMES, Scheme, scheme_for_parameter
from weft.errors import ConfigError


class NumberFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of a matrix: `bits` per number, and `block_bytes` per block of `block_rows` x `block_cols` numbers."""

    bits: float
    block_rows: int = 1
    block_cols: int = 1
    block_bytes: float = 0

    def nbytes(self, rows: Span, cols: Span) -> int:
        """Bytes of these rows and columns of a matrix; a block that is cut counts with all its `block_bytes`."""
        numbers = len(rows) * -(-len(cols) * self.bits // 8)
        return int(numbers + rows.blocks(self.block_rows) * cols.blocks(self.block_cols) * self.block_bytes)


BF16, FP32, FP8 = NumberFormat(bits=16), NumberFormat(bits=32), NumberFormat(bits=8)
FP8_BLOCKS = NumberFormat(bits=8, block_rows=128, block_cols=128, block_bytes=4)
INT8 = NumberFormat(bits=8, block_cols=128, block_bytes=3)
INT4 = NumberFormat(bits=4, block_cols=128, block_bytes=2.5)
MXFP4 = NumberFormat(bits=4, block_cols=32, block_bytes=1)
NVFP4 = NumberFormat(bits=4, block_cols=16, block_bytes=1)

# Format of the matrices in each precision. All other parameters are in the format of OTHERS, by default BF16.
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
# Precision of weights that are not quantised.
OF_DTYPE: dict[DType, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NAMES = (*MATRICES, *gguf_types.MIXES)
ALIASES = (
    gguf_types.ALIASES
    | FORMAT_ALIASES
    | {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "f16": "fp16",
        "float32": "fp32",
        "f32": "fp32",
        "float": "fp32",
        "fp4": "nvfp4",
        "w8a16": "int8",
        "4bit": "int4",
        "4-bit": "int4",
        "8bit": "int8",
        "8-bit": "int8",
        "mxfp4/fp8": "mxfp4",
    }
)
# Meanings of a number of bits alone.
OF_BITS = {"q4": ("q4_k_m", "int4"), "q8": ("q8_0", "int8")}
LAYER = re.compile(r"\.(\d+)\.")  # a layer's number in the name of a tensor


def is_precision(name: str) -> bool:
    """Return True if `canonical` knows the name."""
    key = name.strip().lower()
    return key in NAMES or key in ALIASES


def meant_precisions(name: str) -> tuple[str, ...]:
    """Precisions that a guide may mean by a name, the usual one first: its "Q4" is any form with 4 bits."""
    return OF_BITS.get(name.strip().lower()) or (canonical(name),)


def canonical(name: str) -> str:
    """Name of a precision in NAMES, given that name or an alias. Raises ConfigError with the nearest name."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in NAMES:
        return key
    near = get_close_matches(key, (*NAMES, *ALIASES), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown precision {name!r}; {hint}known: {', '.join((*NAMES, *gguf_types.ALIASES))}", code="unknown-precision"
    )


def held_precision(precision: str) -> str:
    """Name, for `part_format` and its sums, of the form in which Weft's engine holds weights of a precision.

    The engine converts a GGUF file's types, and GPTQ's and AWQ's, to the schemes that it has kernels for, repeats the
    scales of FP8 for each row, and converts vectors to 16 bits. All other precisions are held as they are stored.
    """
    converted = precision in (*gguf_types.MIXES, "int8", "int4", "fp8")
    return precision + gguf_types.HELD_SUFFIX if converted else precision


def own_quantization(shape: ModelShape, precision: str) -> PublishedQuantization | None:
    """Published quantisation of the model's own checkpoint, if that checkpoint is in this precision; else None."""
    published = shape.published
    return published if published and published.precision == precision.removesuffix(gguf_types.HELD_SUFFIX) else None


@lru_cache(maxsize=256)
def similar_layers(shape: ModelShape, precision: str) -> tuple[int, ...]:
    """For each layer, the number of the first layer that is equal and stored in the same way."""
    layers = range(len(shape.layers))
    if precision in gguf_types.BY_LAYER:
        return tuple(layers)
    published = own_quantization(shape, precision)
    exceptions: dict[str, set[tuple[str, str]]] = {}  # by layer: (end of the tensor's name, scheme)
    for name, scheme in published.exceptions if published else ():
        _, *number_and_end = LAYER.split(name, maxsplit=1)
        if number_and_end:
            number, end = number_and_end
            exceptions.setdefault(number, set()).add((end, scheme))
    kinds = shape.library.layers if shape.library else (0,) * len(shape.layers)
    first: dict[tuple[LayerSpec, int, frozenset[tuple[str, str]]], int] = {}
    similar = []
    for layer in layers:
        signature = shape.layers[layer], kinds[layer], frozenset(exceptions.get(str(layer), ()))
        similar.append(first.setdefault(signature, layer))
    return tuple(similar)


def part_format(shape: ModelShape, precision: str, parameter: Parameter, part: Part, layer: int) -> NumberFormat:
    """Format of one tensor of the model; `precision` as `canonical` or `held_precision` returns it."""
    if parameter.dtype == "float32":
        return FP32
    held, precision = precision.endswith(gguf_types.HELD_SUFFIX), precision.removesuffix(gguf_types.HELD_SUFFIX)
    published = own_quantization(shape, precision)
    if held and (published or precision in gguf_types.MIXES):
        return _held_format(scheme_for_parameter(shape, precision, parameter, layer))
    if published:
        return _published_format(published, parameter, part, layer)
    if precision in gguf_types.MIXES:
        type = gguf_types.gguf_type(shape, precision, parameter, part, layer)
        return NumberFormat(bits=gguf_types.BITS[type])
    if held and precision == "fp8":
        return _held_format(scheme_for_parameter(shape, precision, parameter, layer))
    return _usual_format(shape, precision, parameter, part)


def _held_format(name: str | None) -> NumberFormat:
    """Format of weights that the engine holds in a scheme; None: not quantised."""
    if name is None:
        return BF16
    scheme = ALL_SCHEMES[name]
    return NumberFormat(bits=scheme.bits, block_cols=scheme.group, block_bytes=scheme.group_bits / 8)


def _usual_format(shape: ModelShape, precision: str, parameter: Parameter, part: Part) -> NumberFormat:
    """Format in a precision of MATRICES."""
    if parameter.role not in ("linear", "expansion", "expert") or part.cols is None:
        return OTHERS.get(precision, BF16)
    known = find_architecture(shape.architecture)
    if ".attention." in parameter.name and precision in known.attention_kept:
        return BF16
    if precision == "fp8" and known.fp8_in_blocks:
        return FP8_BLOCKS
    if precision in ("int8", "int4") and part.cols.length % UNIT:
        return BF16
    return MATRICES[precision]


def _published_format(published: PublishedQuantization, parameter: Parameter, part: Part, layer: int) -> NumberFormat:
    """Format of a tensor in the model's own checkpoint."""
    name = published.stored_as(part.source.format(layer=layer, expert=0), parameter.role).removesuffix(ORDERED)
    if name not in ALL_SCHEMES:
        return BF16
    scheme = ALL_SCHEMES[name]
    if scheme.lowest == "fp8":
        rows = published.rows if scheme.group == published.group else 1
        return NumberFormat(bits=8, block_rows=rows, block_cols=scheme.group, block_bytes=4)
    if scheme.lowest == "mxfp4":
        return MXFP4
    if name in WIDE_SCHEMES:
        return _wide_format(published, scheme)
    zero = 0 if scheme.lowest == "middle" else scheme.bits / 8
    return NumberFormat(bits=scheme.bits, block_cols=scheme.group, block_bytes=2 + zero)


def _wide_format(published: PublishedQuantization, scheme: Scheme) -> NumberFormat:
    """Format in the file of numbers with 32-bit scales. Double quantisation leaves a byte of each scale, and one of
    32 bits for 256 of them."""
    return NumberFormat(
        bits=scheme.bits,
        block_cols=published.group if scheme.group < ROW else ROW,
        block_bytes=1 + 4 / 256 if published.nested else 4,
    )


def scale_columns(shape: ModelShape, precision: str) -> int:
    """Number of columns of a matrix that share a scale; 1 if there are no such scales."""
    precision = canonical(precision.removesuffix(gguf_types.HELD_SUFFIX))
    if precision == "fp8" and find_architecture(shape.architecture).fp8_in_blocks:
        return FP8_BLOCKS.block_cols
    if published := own_quantization(shape, precision):
        return published.group if published.group < ROW and published.scheme in ALL_SCHEMES else 1
    return MATRICES[precision].block_cols if precision in MATRICES else 1


def parameter_bytes(shape: ModelShape, precision: str, place: Place, parameter: Parameter, layer: int = 0) -> int:
    """Bytes of one parameter on this rank, all experts together; of a parameter of the layers, the bytes in one
    layer."""
    total = 0
    for part in parameter.parts:
        rows = part.rows.owned(place)
        cols = Span(0, 1) if part.cols is None else part.cols.owned(place)
        total += part_format(shape, precision, parameter, part, layer).nbytes(rows, cols)
    return total * len(place.experts) if parameter.role == "expert" else total


class WeightBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's weights by kind.

    `linear` are the matrices of attention and of dense and shared MLPs; `others` are norms, biases and routers.
    """

    embedding: int = 0
    linear: int = 0
    expert: int = 0
    head: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.expert + self.head + self.others


def weights_by_kind(shape: ModelShape, precision: str, place: Place | None = None) -> WeightBytes:
    """Bytes of a rank's weights (default: the whole model's) by kind. Raises ConfigError for an unknown precision.

    A tied head counts with the embedding, and once more on a last stage that does not hold the embedding.
    """
    return sum_by_kind(shape, canonical(precision), place or whole(shape))


def sum_by_kind(shape: ModelShape, precision: str, place: Place) -> WeightBytes:
    """`weights_by_kind` for a precision as `canonical` or `held_precision` returns it."""
    # Similar layers are computed once: the first of them, and their number.
    layers = Counter(similar_layers(shape, precision)[place.layers.start : place.layers.stop])
    kinds = {"embedding": 0, "linear": 0, "expert": 0, "head": 0, "others": 0}

    def count(parameter: Parameter, layer: int, times: int) -> None:
        kind = "linear" if parameter.role == "expansion" else parameter.role if parameter.role in kinds else "others"
        kinds[kind] += times * parameter_bytes(shape, precision, place, parameter, layer)

    for parameter in outer_parameters(shape):
        if is_held_outside_layers(shape, place, parameter):
            count(parameter, 0, 1)
    for layer, times in layers.items():
        for parameter in layer_parameters(shape, layer):
            count(parameter, layer, times)
    return WeightBytes(**kinds)


def weight_bytes(shape: ModelShape, precision: str, place: Place | None = None) -> int:
    """Bytes of a rank's weights (default: the whole model's). Raises ConfigError for an unknown precision."""
    return weights_by_kind(shape, precision, place).total
