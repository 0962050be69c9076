"""Schemes: how the engine holds quantised weights, and which parameters it quantises itself, as data.

What a scheme computes is in `quant` and in the kernels. A matrix is stored along its rows, in groups of columns with a
16-bit scale each; a rank that owns some of the columns of a group holds the scale of all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal

import msgspec

from weft.architectures.axes import axis_length
from weft.architectures.parameters import Parameter
from weft.architectures.place import Span
from weft.architectures.published import Method, scheme_name
from weft.architectures.shape import ModelShape
from weft.formats import gguf_types
from weft.formats.quantization_config import BITS, GROUPS

UNIT = 32  # columns that are never parted: what a kernel multiplies at once; a group, several or half of one


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers are w = scale * q + lowest, q of `bits` bits without a sign, the scale of 16 bits and one for each
    `group` columns. `lowest` is stored as 16 bits ("minimum"), or is scale * -zero, `zero` a byte ("zero"), or is
    scale * -2^(bits - 1) ("middle")."""

    bits: int
    group: int
    lowest: Literal["middle", "zero", "minimum"]

    @property
    def group_bits(self) -> int:
        """What a group takes beside its numbers."""
        return 16 + {"middle": 0, "zero": 8, "minimum": 16}[self.lowest]

    def nbytes(self, rows: int, cols: Span) -> int:
        """Bytes of so many rows and of these columns, in multiples of UNIT, of a matrix."""
        return rows * (len(cols) * self.bits + cols.blocks(self.group) * self.group_bits) // 8

    def holds(self, other: Scheme) -> bool:
        """Whether all that the other can say can be said in this one."""
        finer = self.bits >= other.bits and other.group % self.group == 0
        return finer and self.lowest in ("minimum", other.lowest)


# What there are kernels for. Those that have the name of a GGUF type are this type, bit for bit.
SCHEMES = {
    "INT8": Scheme(bits=8, group=128, lowest="zero"),
    "Q8_0": Scheme(bits=8, group=32, lowest="middle"),
    "Q8_MIN": Scheme(bits=8, group=32, lowest="minimum"),
    "Q4_1": Scheme(bits=4, group=32, lowest="minimum"),
    "Q4_0": Scheme(bits=4, group=32, lowest="middle"),
    "Q4_16": Scheme(bits=4, group=16, lowest="middle"),
    "Q4_16_MIN": Scheme(bits=4, group=16, lowest="minimum"),
}
# What GGUF's types are once they are unpacked. The values of IQ4 are 16 of 8 bits; where a block has several groups,
# their scales and minima are products of the block's with whole numbers, which are rounded to 16 bits.
GGUF_SCHEMES = {
    "Q4_0": SCHEMES["Q4_0"],
    "Q4_1": SCHEMES["Q4_1"],
    "Q5_0": Scheme(bits=5, group=32, lowest="middle"),
    "Q5_1": Scheme(bits=5, group=32, lowest="minimum"),
    "Q8_0": SCHEMES["Q8_0"],
    "Q2_K": Scheme(bits=2, group=16, lowest="minimum"),
    "Q3_K": Scheme(bits=3, group=16, lowest="middle"),
    "Q4_K": Scheme(bits=4, group=32, lowest="minimum"),
    "Q5_K": Scheme(bits=5, group=32, lowest="minimum"),
    "Q6_K": Scheme(bits=6, group=16, lowest="middle"),
    "IQ4_NL": SCHEMES["Q8_0"],
    "IQ4_XS": SCHEMES["Q8_0"],
}
# Rounded anew where no scheme holds them as they are: 8 bits in groups of 32 lose half a percent, as much as x does
# where it is rounded to 8 bits, and add a twentieth to what Q6_K has lost before (docs/benchmarks.md).
ROUNDED = dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), SCHEMES["Q8_0"])
# What GPTQ, AWQ and compressed-tensors publish, bit for bit; their files have zero points of `bits` bits.
PUBLISHED_SCHEMES = {
    scheme_name(bits, group, symmetric): Scheme(bits=bits, group=group, lowest="middle" if symmetric else "zero")
    for bits in BITS
    for group in GROUPS
    for symmetric in (False, True)
}
ALL_SCHEMES = SCHEMES | PUBLISHED_SCHEMES
# What a user may ask for of any checkpoint, and the precision (formats.precision) that it becomes. GPTQ and AWQ choose
# groups of 128 with the help of examples; that is too coarse for weights rounded without examples. A head rounded to
# 4 bits costs more quality than its bytes are worth.
ONLINE_QUANTIZATIONS = {"int8": "int8", "int4": "q4_1+q8_0", "q4_0": "q4_0+q8_0", "q4_1": "q4_1+q8_0", "q8_0": "q8_0"}
# What vLLM calls that which GPTQ, AWQ and compressed-tensors publish; the kernels are ours whatever its word.
METHODS: dict[str, Method] = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}
QUANTIZATIONS = ("auto", "none", *ONLINE_QUANTIZATIONS, *METHODS)


def online_quantization(precision: str) -> str | None:
    """The word of MADE for weights of a precision, those of a GGUF file without its head counted; None where there is
    none."""
    return next(
        (word for word, made in reversed(ONLINE_QUANTIZATIONS.items()) if precision in (made, made.partition("+")[0])),
        None,
    )


def scheme_for_types(types: Iterable[str]) -> str | None:
    """The smallest scheme that holds what is stored in all of these types, as the parts of one parameter are; None
    where one of them is no quantised type of GGUF's, unless all are one of PUBLISHED."""
    return _held_as(frozenset(types))


@cache
def _held_as(types: frozenset[str]) -> str | None:
    if len(types) == 1 and types <= PUBLISHED_SCHEMES.keys():
        return min(types)
    if not types <= GGUF_SCHEMES.keys():
        return None
    for stored in ([GGUF_SCHEMES[kind] for kind in types], [ROUNDED.get(kind, GGUF_SCHEMES[kind]) for kind in types]):
        fit = [name for name, scheme in SCHEMES.items() if all(map(scheme.holds, stored))]
        if fit:
            return min(fit, key=lambda name: SCHEMES[name].nbytes(1, Span(0, 256)))
    raise AssertionError(f"no scheme has room for {', '.join(sorted(types))}")


def scheme_for_parameter(shape: ModelShape, precision: str, parameter: Parameter, layer: int = 0) -> str | None:
    """The scheme that a parameter gets in a precision of MADE, from a GGUF file in one of its mixes, or from its own
    checkpoint where GPTQ, AWQ or compressed-tensors made that; None where it stays in 16 bits."""
    cols = parameter.parts[0].cols
    if cols is None or axis_length(shape, cols) % UNIT:
        return None
    if shape.published and precision == shape.published.precision:
        names = (part.source.format(layer=layer, expert=0) for part in parameter.parts)
        return scheme_for_types(shape.published.stored_as(name, parameter.role) for name in names)
    if precision == "int8":
        return "INT8" if parameter.role == "linear" else None
    return scheme_for_types(gguf_types.gguf_type(shape, precision, parameter, part, layer) for part in parameter.parts)
