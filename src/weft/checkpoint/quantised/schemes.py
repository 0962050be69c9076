"""Schemes: the engine's storage formats for quantised weights, as data, and the scheme of each parameter.

The arithmetic of a scheme is in `quant` and in the kernels. A matrix is stored by rows, in groups of columns with a
scale each; a rank that owns only some columns of a group holds the group's scale all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal

import msgspec

from weft.checkpoint.architectures.parameters import Parameter
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.published import ROW, PublishedQuantization, scheme_name
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files import gguf_types

NESTED_HALVES, NESTED_BYTES = 2, 12  # 16-bit numbers, and bytes of 6-bit ones, per group of a nested scheme
# Bits, and columns that share a scale, of whole numbers that are held bit for bit.
BITS = (4, 8)
GROUPS = (32, 64, 128, 256, 512, 1024, ROW)
FP8_COLUMNS = (32, 64, 128, 256, 512)  # columns of a block of FP8 with one scale
TABLE_GROUPS = tuple(32 << i for i in range(8))  # columns: blocks of bitsandbytes, or parts of them
UNIT = 32  # columns that are never cut apart: a kernel multiplies them at once; one group, several or half of one


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Quantised numbers w = scale * q + lowest; q has `bits` bits; each `group` columns share a scale.

    The scale has 16 bits and q no sign, unless `lowest` says otherwise.

    `lowest` is one of

    - "minimum": stored in 16 bits;
    - "zero": scale * -zero with a stored byte `zero`;
    - "middle": scale * -2^(bits - 1), not stored;
    - "signed": as "middle", but the scale has 32 bits;
    - "nested", as in GGUF's K-quants: a group has two 16-bit numbers, and for each UNIT of its columns two 6-bit
      integers, whose products are the scale and -minimum of the UNIT;
    - "mxfp4": none; q is the index of one of MXFP4_VALUES, and the scale is 2^(byte - 127) with a stored byte;
    - "fp8": none; q are the bits of an 8-bit floating-point number (E4M3), and the scale has 32 bits;
    - "nf4" and "fp4": none; q is the index of a value of a table in TABLES, and the scale has 32 bits.
    """

    bits: int
    group: int
    lowest: Literal["middle", "zero", "minimum", "mxfp4", "nested", "fp8", "nf4", "fp4", "signed"]

    @property
    def group_bits(self) -> int:
        """Bits of a group besides its numbers: scale, and minimum or zero point."""
        if self.lowest == "mxfp4":
            return 8
        if self.lowest == "nested":
            return 8 * (NESTED_HALVES * 2 + NESTED_BYTES)
        return 16 + {"middle": 0, "zero": 8}.get(self.lowest, 16)

    def nbytes(self, rows: int, cols: Span) -> int:
        """Bytes of these columns (in multiples of UNIT) of `rows` rows of a matrix."""
        return rows * (len(cols) * self.bits + cols.blocks(self.group) * self.group_bits) // 8

    def holds(self, other: Scheme) -> bool:
        """Return True if this scheme can represent all numbers of the other scheme exactly."""
        finer = self.bits >= other.bits and other.group % self.group == 0
        return finer and self.lowest in ("minimum", other.lowest)


# Schemes that the engine quantises to, or loads GGUF types into. One with the name of a GGUF type is that type, bit for
# bit.
SCHEMES = {
    "INT8": Scheme(bits=8, group=128, lowest="zero"),
    "Q8_0": Scheme(bits=8, group=32, lowest="middle"),
    "Q8_MIN": Scheme(bits=8, group=32, lowest="minimum"),
    "Q4_1": Scheme(bits=4, group=32, lowest="minimum"),
    "Q4_K": Scheme(bits=4, group=256, lowest="nested"),
    "Q4_0": Scheme(bits=4, group=32, lowest="middle"),
    "Q4_16": Scheme(bits=4, group=16, lowest="middle"),
    "Q4_16_MIN": Scheme(bits=4, group=16, lowest="minimum"),
}
# Each GGUF type as a scheme, after unpacking. IQ4's values are a table of 8-bit numbers. If a block has several groups,
# their scales and minima are products of the block's own with integers, and are rounded to 16 bits, except in Q4_K.
GGUF_SCHEMES = {
    "Q4_0": SCHEMES["Q4_0"],
    "Q4_1": SCHEMES["Q4_1"],
    "Q5_0": Scheme(bits=5, group=32, lowest="middle"),
    "Q5_1": Scheme(bits=5, group=32, lowest="minimum"),
    "Q8_0": SCHEMES["Q8_0"],
    "Q2_K": Scheme(bits=2, group=16, lowest="minimum"),
    "Q3_K": Scheme(bits=3, group=16, lowest="middle"),
    "Q4_K": SCHEMES["Q4_K"],
    "Q5_K": Scheme(bits=5, group=32, lowest="minimum"),
    "Q6_K": Scheme(bits=6, group=16, lowest="middle"),
    "IQ4_NL": SCHEMES["Q8_0"],
    "IQ4_XS": SCHEMES["Q8_0"],
}
# Values of MXFP4's numbers: 4-bit floating-point numbers (E2M1), the sign in the highest bit. Source: OCP Microscaling
# Formats (MX) Specification 1.0, 5.3.3.
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The scheme of MXFP4, in GGUF files and as published with gpt-oss. No other scheme holds it, and it holds no other.
FLOAT_SCHEMES = {"MXFP4": Scheme(bits=4, group=32, lowest="mxfp4")}
# FP8 (E4M3, OCP 8-bit Floating Point Specification 1.0) with a scale for each row, or for each block of columns of a
# row. Blocks of rows, and whole tensors, have their scale repeated row by row: so a rank may have any rows of a matrix,
# and matrices with different scales are multiplied together. That takes 4 bytes more for each row and group.
FP8_SCHEMES = {scheme_name("fp8", group): Scheme(bits=8, group=group, lowest="fp8") for group in (*FP8_COLUMNS, ROW)}
# bitsandbytes' tables of the 4-bit values: NF4 (quantiles of the normal distribution, QLoRA, arXiv 2305.14314), and
# its own FP4. Source: bitsandbytes, functional.get_4bit_type. Mirrored in native/cpp/quantised.h.
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*(value / 12 for value in _TWELFTHS), *(-value / 12 for value in _TWELFTHS)),
}
# Numbers with 32-bit scales, as bitsandbytes and compressed-tensors (int-quantized) publish them.
WIDE_SCHEMES = {scheme_name("nf4", group): Scheme(bits=4, group=group, lowest="nf4") for group in TABLE_GROUPS} | {
    scheme_name("fp4", group): Scheme(bits=4, group=group, lowest="fp4") for group in TABLE_GROUPS
}
WIDE_SCHEMES[scheme_name("signed", ROW)] = Scheme(bits=8, group=ROW, lowest="signed")
# Types that are rounded again, since no scheme holds them exactly. 8 bits in groups of 32 lose half a percent, as much
# as rounding the activations to 8 bits does, and add a twentieth to the loss of Q6_K itself (docs/benchmarks.md).
ROUNDED = dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), SCHEMES["Q8_0"])
# GPTQ's, AWQ's and compressed-tensors' formats, bit for bit; zero points have `bits` bits in their files.
PUBLISHED_SCHEMES = {
    scheme_name("integers", group, bits, symmetric): Scheme(
        bits=bits, group=group, lowest="middle" if symmetric else "zero"
    )
    for bits in BITS
    for group in GROUPS
    for symmetric in (False, True)
}
ALL_SCHEMES = SCHEMES | PUBLISHED_SCHEMES | FLOAT_SCHEMES | FP8_SCHEMES | WIDE_SCHEMES
# --quantization values for any checkpoint: weights are quantised as they are loaded, to this precision of
# formats.precision. GPTQ and AWQ choose their groups of 128 with calibration data; groups of 128 are too coarse for
# weights rounded without. A head rounded to 4 bits costs more quality than its bytes are worth.
ONLINE_QUANTIZATIONS = {
    "int8": "int8",
    "int4": "q4_1+q8_0",
    "fp8": "fp8",
    "q4_0": "q4_0+q8_0",
    "q4_1": "q4_1+q8_0",
    "q8_0": "q8_0",
}
# Roles of the parameters that --quantization of these precisions rounds; the other precisions are GGUF mixes.
ONLINE_ROLES = {"int8": ("linear",), "fp8": ("linear", "expert")}


def online_quantization(precision: str) -> str | None:
    """The --quantization value that gives weights of this precision, apart from the head; None if there is none."""
    for name, result in reversed(ONLINE_QUANTIZATIONS.items()):
        if precision in (result, result.partition("+")[0]):
            return name
    return None


def scheme_for_types(types: Iterable[str]) -> str | None:
    """The smallest scheme that holds tensors of all of these types, as the parts of one parameter are stored.

    None if one of the types is not quantised, or if there are no kernels for it.
    """
    return _scheme_for_types(frozenset(types))


@cache
def _scheme_for_types(types: frozenset[str]) -> str | None:
    if len(types) == 1 and types <= PUBLISHED_SCHEMES.keys() | FLOAT_SCHEMES.keys() | WIDE_SCHEMES.keys():
        return min(types)
    if types <= FP8_SCHEMES.keys():
        # A row's scale may be repeated for each group; groups of two lengths have no scheme.
        groups = types - {scheme_name("fp8", ROW)}
        return min(types if len(groups) == 0 else groups) if len(groups) < 2 else None
    if not types <= GGUF_SCHEMES.keys():
        return None
    exact = _smallest_holding([GGUF_SCHEMES[type] for type in types])
    scheme = exact or _smallest_holding([ROUNDED.get(type, GGUF_SCHEMES[type]) for type in types])
    assert scheme is not None, f"no scheme has room for {', '.join(sorted(types))}"
    return scheme


def _smallest_holding(stored: Sequence[Scheme]) -> str | None:
    """Name of the smallest of SCHEMES that holds all of these schemes exactly; None if there is none."""
    candidates = [name for name, scheme in SCHEMES.items() if all(map(scheme.holds, stored))]
    return min(candidates, key=lambda name: SCHEMES[name].nbytes(1, Span(0, 256)), default=None)


def _published_scheme(published: PublishedQuantization, parameter: Parameter, layer: int) -> str | None:
    names = (part.source.format(layer=layer, expert=0) for part in parameter.parts)
    return scheme_for_types(published.stored_as(name, parameter.role) for name in names)


def _online_scheme(shape: ModelShape, precision: str, role: str) -> str | None:
    if role not in ONLINE_ROLES[precision]:
        return None
    return "INT8" if precision == "int8" else fp8_scheme(shape)


def scheme_for_parameter(shape: ModelShape, precision: str, parameter: Parameter, layer: int = 0) -> str | None:
    """Scheme of a parameter whose weights are in this precision; None if the parameter stays in 16 bits.

    The precision is one of ONLINE_QUANTIZATIONS, the mix of a GGUF file, or the precision of the model's own published
    checkpoint.
    """
    cols = parameter.parts[0].cols
    if cols is None or cols.length % UNIT or parameter.role == "expansion":
        return None
    if shape.published and precision == shape.published.precision:
        return _published_scheme(shape.published, parameter, layer)
    if precision in ONLINE_ROLES:
        return _online_scheme(shape, precision, parameter.role)
    return scheme_for_types(gguf_types.gguf_type(shape, precision, parameter, part, layer) for part in parameter.parts)


def fp8_scheme(shape: ModelShape) -> str:
    """Scheme that weights of this architecture are rounded to by --quantization fp8."""
    return scheme_name("fp8", 128 if find_architecture(shape.architecture).fp8_in_blocks else ROW)
