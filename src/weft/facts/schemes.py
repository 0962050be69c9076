"""Schemes: how the engine holds quantised weights, and which parameters it quantises itself, as data.

What a scheme computes is in `quant` and in the kernels. A matrix is stored along its rows, in groups of columns with a
16-bit scale each; a rank that owns some of the columns of a group holds the scale of all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.facts import gguf_types
from weft.facts.axes import axis_length
from weft.facts.parameters import Parameter, Part
from weft.facts.place import Span
from weft.facts.shape import ModelShape

UNIT = 32  # columns that are never parted: what a kernel multiplies at once, and the smallest group


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers are w = scale * q + lowest, q of `bits` bits without a sign, the scale of 16 bits and one for each
    `group` columns. `lowest` is stored as 16 bits ("minimum"), or is scale * -zero, `zero` of as many bits as q
    ("zero"), or is scale * -2^(bits - 1) ("middle")."""

    bits: int
    group: int
    lowest: Literal["middle", "zero", "minimum"]

    @property
    def group_bits(self) -> int:
        """What a group takes beside its numbers."""
        return 16 + {"middle": 0, "zero": self.bits, "minimum": 16}[self.lowest]

    def nbytes(self, rows: int, cols: Span) -> int:
        """Bytes of so many rows and of these columns, in multiples of UNIT, of a matrix."""
        return rows * (len(cols) * self.bits + cols.blocks(self.group) * self.group_bits) // 8


# GGUF's types are held bit for bit.
SCHEMES = {
    "INT8": Scheme(bits=8, group=128, lowest="zero"),
    "Q8_0": Scheme(bits=8, group=32, lowest="middle"),
    "Q4_1": Scheme(bits=4, group=32, lowest="minimum"),
    "Q4_0": Scheme(bits=4, group=32, lowest="middle"),
}
# What can be asked for, of any checkpoint, and what is made of it in the words of `facts.precision`. Groups of 128, as
# GPTQ and AWQ choose with the help of examples, are too coarse for weights that are rounded by themselves; and a head
# that is rounded to 4 bits costs more than its bytes are worth.
MADE = {"int8": "int8", "int4": "q4_1+q8_0", "q4_0": "q4_0+q8_0", "q4_1": "q4_1+q8_0", "q8_0": "q8_0"}
QUANTIZATIONS = ("auto", "none", *MADE)


def asked_for(precision: str) -> str | None:
    """The word of MADE for weights of a precision, those of a GGUF file without its head counted; None where there is
    none."""
    return next((word for word, made in reversed(MADE.items()) if precision in (made, made.partition("+")[0])), None)


def scheme_of(shape: ModelShape, precision: str, parameter: Parameter, part: Part) -> str | None:
    """The scheme that a tensor gets in a precision of MADE; None where it stays in 16 bits."""
    if part.cols is None or axis_length(shape, part.cols) % UNIT:
        return None
    if precision == "int8":
        return "INT8" if parameter.role == "linear" else None
    kind = gguf_types.type_of(shape, precision, parameter, part, 0)
    return kind if kind in SCHEMES else None
