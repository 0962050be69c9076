"""Published quantisation: how the weights of a checkpoint from GPTQ, AWQ or compressed-tensors are stored."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

Method = Literal["gptq", "awq", "compressed-tensors"]

ROW = 1 << 20  # columns: a group longer than any row, so that each row is one group
ORDERED = "_ORDERED"  # suffix of a scheme that no kernel multiplies with: each column names its group


class PublishedQuantization(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The matrices of attention, MLPs and experts are in `scheme`; a head is not. `exceptions` are tensors, by their
    name, that are stored otherwise, "" for those that are not quantised. `ordered`: columns were taken in the order of
    their activations (desc_act), so that those of a group lie apart. `zero_offset` is added to a stored zero point."""

    method: Method
    bits: int
    group: int
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0
    exceptions: tuple[tuple[str, str], ...] = ()

    @property
    def scheme(self) -> str:
        """The name of what the matrices are in; of `formats.schemes` where kernels multiply with it."""
        return scheme_name(self.bits, self.group, self.symmetric) + ORDERED * self.ordered

    @property
    def precision(self) -> str:
        """In the words of `formats.precision`."""
        return f"int{self.bits}"

    def stored_as(self, tensor: str, role: str) -> str:
        """What a matrix is stored in, by its name and by what it does; "" where it is not quantised."""
        usual = self.scheme if role in ("linear", "expert") else ""
        return _exceptions(self).get(tensor, usual)


def scheme_name(bits: int, group: int, symmetric: bool) -> str:
    """ "INT4_128", "INT8_ROW_SYM" """
    return f"INT{bits}_{'ROW' if group == ROW else group}{'_SYM' * symmetric}"


@lru_cache(maxsize=64)
def _exceptions(published: PublishedQuantization) -> dict[str, str]:
    """By name."""
    return dict(published.exceptions)
