"""Published quantisation: the format of a checkpoint whose weights were quantised, as its config.json describes it."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Literal

import msgspec

Wide = Literal["", "nf4", "fp4", "signed"]  # see `PublishedQuantization.wide`
Numbers = Literal["integers", "fp8", "mxfp4", "nf4", "fp4", "signed"]  # kinds of stored numbers

ROW = 1 << 20  # columns: a group longer than any row, so that each row is one group
ORDERED = "_ORDERED"  # suffix of a scheme in which each column names its group; no kernel multiplies with these


class PublishedQuantization(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Storage format of the quantised weights of one checkpoint.

    Attention, MLPs and experts are in `scheme`, or in MXFP4 the experts alone; the head is not quantised.

    - `method`: the library or format, as `quant_method` of a config.json names it.
    - `bits`: of each stored number, without its part of the scales.
    - `group`: columns that share a scale; ROW for one scale per row.
    - `symmetric`: groups have a scale alone, and no zero point.
    - `ordered`: columns were quantised in the order of their activations (desc_act), so a group's columns lie apart.
    - `zero_offset`: added to each stored zero point.
    - `floating`: numbers are FP8 (E4M3), of `bits` 8.
    - `rows`: rows that share a scale, if numbers are FP8; ROW for one scale per matrix.
    - `wide`: numbers have 32-bit scales: indices of a table of 16 values (`schemes.TABLES`), or "signed" ones of 8
      bits; "" for all others.
    - `nested`: scales are themselves rounded to 8 bits (bitsandbytes' double quantisation).
    - `mixed`: the config says that layers differ in groups, zero points or order; else all tensors must be as it says.
    - `exceptions`: (tensor name, scheme) of tensors that are stored otherwise; "" for a tensor that is not quantised.
    """

    method: str
    bits: int
    group: int
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0
    floating: bool = False
    rows: int = 1
    wide: Wide = ""
    nested: bool = False
    mixed: bool = False
    exceptions: tuple[tuple[str, str], ...] = ()

    @property
    def numbers(self) -> Numbers:
        """Kind of the stored numbers."""
        if self.floating:
            return "fp8"
        return self.wide or ("mxfp4" if self.method == "mxfp4" else "integers")

    @property
    def scheme(self) -> str:
        """Name of the scheme of the matrices without exceptions; a key of `checkpoint.quantised.schemes` if there
        are kernels for it."""
        return scheme_name(self.numbers, self.group, self.bits, self.symmetric) + ORDERED * self.ordered

    @property
    def precision(self) -> str:
        """Name in `checkpoint.quantised.precision`: int4, int8, fp8 or mxfp4. Tables of 16 values (nf4, fp4) count
        as int4."""
        return self.numbers if self.numbers in ("fp8", "mxfp4") else f"int{self.bits}"

    def stored_as(self, tensor: str, role: str) -> str:
        """Scheme of a matrix, given its tensor name and its parameter's role; "" if it is not quantised."""
        matrix = role == "expert" or (role in ("linear", "expansion") and self.method != "mxfp4")
        default = self.scheme if matrix else ""
        return _exceptions(self).get(tensor, default)


def scheme_name(numbers: Numbers, group: int, bits: int = 8, symmetric: bool = True) -> str:
    """Name of the scheme of numbers of which `group` columns share a scale, as in "INT4_128", "INT8_ROW_SYM",
    "FP8_128", "NF4_64" or "SIGNED8_ROW"; `bits` and `symmetric` count for whole numbers alone."""
    if numbers == "mxfp4":
        return "MXFP4"
    kind = {"integers": f"INT{bits}", "signed": "SIGNED8"}.get(numbers, numbers.upper())
    return f"{kind}_{'ROW' if group == ROW else group}{'_SYM' * (symmetric and numbers == 'integers')}"


def held_group(group: int, cols: int) -> int:
    """Columns that share a scale, in rows of `cols` columns, if `group` numbers do that lie one after the other, row by
    row: as many as divide both."""
    return group if group == ROW else gcd(group, cols)


@lru_cache(maxsize=64)
def _exceptions(published: PublishedQuantization) -> dict[str, str]:
    """Scheme of each exceptional tensor, by tensor name."""
    return dict(published.exceptions)
