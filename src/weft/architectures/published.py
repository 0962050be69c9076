"""Published quantisation: the storage format of a GPTQ, AWQ, compressed-tensors or MXFP4 checkpoint."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

Method = Literal["gptq", "awq", "compressed-tensors", "mxfp4"]

ROW = 1 << 20  # columns: a group longer than any row, so that each row is one group
ORDERED = "_ORDERED"  # suffix of a scheme in which each column names its group; no kernel multiplies with these


class PublishedQuantization(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Storage format of the quantised weights of one checkpoint.

    The matrices of attention, MLPs and experts are in `scheme`, of MXFP4 those of experts; the head is not quantised.

    - `group`: columns that share a scale; ROW for one scale per row.
    - `ordered`: columns were quantised in the order of their activations (desc_act), so a group's columns lie apart.
    - `zero_offset`: added to each stored zero point.
    - `exceptions`: (tensor name, scheme) of tensors that are stored otherwise; "" for one that is not quantised.
    """

    method: Method
    bits: int
    group: int
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0
    exceptions: tuple[tuple[str, str], ...] = ()

    @property
    def scheme(self) -> str:
        """Name of the scheme of the matrices; a key of `formats.schemes` if there are kernels for it."""
        if self.method == "mxfp4":
            return "MXFP4"
        return scheme_name(self.bits, self.group, self.symmetric) + ORDERED * self.ordered

    @property
    def precision(self) -> str:
        """Name in `formats.precision`: int4, int8 or mxfp4."""
        return "mxfp4" if self.method == "mxfp4" else f"int{self.bits}"

    def stored_as(self, tensor: str, role: str) -> str:
        """Scheme of a matrix, given its tensor name and its parameter's role; "" if it is not quantised."""
        matrix = role == "expert" or (role in ("linear", "expansion") and self.method != "mxfp4")
        default = self.scheme if matrix else ""
        return _exceptions(self).get(tensor, default)


def scheme_name(bits: int, group: int, symmetric: bool) -> str:
    """Name of a published scheme, as in "INT4_128" or "INT8_ROW_SYM"."""
    return f"INT{bits}_{'ROW' if group == ROW else group}{'_SYM' * symmetric}"


@lru_cache(maxsize=64)
def _exceptions(published: PublishedQuantization) -> dict[str, str]:
    """Scheme of each exceptional tensor, by tensor name."""
    return dict(published.exceptions)
