"""Quantised weights: a matrix, or some of its rows and columns, in a scheme of `checkpoint.quantised.schemes`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.quantised.schemes import (
    ALL_SCHEMES,
    MXFP4_VALUES,
    NESTED_BYTES,
    NESTED_HALVES,
    TABLES,
    UNIT,
    Scheme,
)

# By `Scheme.lowest`; all others: float16.
SCALE_DTYPES = {"mxfp4": torch.uint8} | dict.fromkeys(("fp8", "nf4", "fp4", "signed"), torch.float32)


@dataclass(frozen=True)
class QuantisedWeight:
    """A quantised matrix [rows, cols], stored row by row, or a stack of them [experts, rows, cols].

    One matrix: `values` is [rows, cols * bits / 8] uint8. With 4 bits, the first half of each UNIT columns are the low
    nibbles of UNIT / 2 bytes, the second half the high ones. `scales` is [rows, groups] float16; uint8 for MXFP4,
    float32 for FP8, tables and signed numbers. `lowest` is as many minima (float16) or zero points (uint8), or None for
    other schemes. In nested schemes, `scales` is [rows, groups * 2] and `lowest` [rows, groups * 12] uint8: 6-bit
    numbers as GGUF packs them. The first group lacks `lacking` columns. `dtype` is the activations'.
    """

    type: str
    values: torch.Tensor
    scales: torch.Tensor
    lowest: torch.Tensor | None
    lacking: int
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, type: str, rows: int, cols: Span, dtype: torch.dtype, device: torch.device, experts: tuple[int, ...] = ()
    ) -> QuantisedWeight:
        """Uninitialised memory for the columns `cols` of a matrix, a range in multiples of UNIT.

        `experts` is (number,) for a stack of matrices.
        """
        scheme = ALL_SCHEMES[type]
        groups, lowest = cols.blocks(scheme.group), None
        scale_dtype = SCALE_DTYPES.get(scheme.lowest, torch.float16)
        scales = groups * NESTED_HALVES if scheme.lowest == "nested" else groups
        if scheme.lowest in ("zero", "minimum", "nested"):
            kind = torch.float16 if scheme.lowest == "minimum" else torch.uint8
            numbers = groups * NESTED_BYTES if scheme.lowest == "nested" else groups
            lowest = torch.empty(*experts, rows, numbers, dtype=kind, device=device)
        return cls(
            type,
            torch.empty(*experts, rows, len(cols) * scheme.bits // 8, dtype=torch.uint8, device=device),
            torch.empty(*experts, rows, scales, dtype=scale_dtype, device=device),
            lowest,
            cols.start % scheme.group,
            dtype,
        )

    @property
    def scheme(self) -> Scheme:
        return ALL_SCHEMES[self.type]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of one matrix."""
        rows, nbytes = self.values.shape[-2:]
        return rows, nbytes * 8 // self.scheme.bits

    def select(self, dim: int, expert: int) -> QuantisedWeight:
        """A view of one matrix of a stack; `dim` must be 0."""
        assert dim == 0 and self.values.dim() == 3
        lowest = None if self.lowest is None else self.lowest[expert]
        return replace(self, values=self.values[expert], scales=self.scales[expert], lowest=lowest)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors of the weight, by their fields."""
        parts = {"values": self.values, "scales": self.scales, "lowest": self.lowest}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def empty_on(self, device: torch.device) -> QuantisedWeight:
        """Uninitialised memory for a weight like this one, on a device."""
        values, scales = (torch.empty_like(part, device=device) for part in (self.values, self.scales))
        lowest = None if self.lowest is None else torch.empty_like(self.lowest, device=device)
        return replace(self, values=values, scales=scales, lowest=lowest)

    def narrow(self, dim: int, start: int, length: int) -> QuantisedWeight:
        """A view of `length` rows from `start` on of one matrix; `dim` must be 0."""
        assert dim == 0 and self.values.dim() == 2
        lowest = None if self.lowest is None else self.lowest.narrow(0, start, length)
        values, scales = self.values.narrow(0, start, length), self.scales.narrow(0, start, length)
        return replace(self, values=values, scales=scales, lowest=lowest)

    def numbers(self) -> torch.Tensor:
        """The unsigned numbers q of the weights: [rows, cols] uint8."""
        if self.scheme.bits == 8:
            return self.values
        return unpack_nibbles(self.values)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights that the numbers stand for: [rows, cols], computed in float32."""
        cols = torch.arange(self.shape[1], device=self.device)
        if self.scheme.lowest == "nested":
            unit = (cols + self.lacking) // UNIT
            scale, minimum = self._nested_numbers()
            return self.numbers().float().mul_(scale[:, unit]).add_(minimum[:, unit]).to(dtype)
        group = (cols + self.lacking) // self.scheme.group
        if self.scheme.lowest == "mxfp4":
            values = torch.tensor(MXFP4_VALUES, device=self.device).take(self.numbers().long())
            return values.mul_(torch.exp2(self.scales.float() - 127)[:, group]).to(dtype)
        if self.scheme.lowest in TABLES:
            values = torch.tensor(TABLES[self.scheme.lowest], device=self.device).take(self.numbers().long())
            return values.mul_(self.scales[:, group]).to(dtype)
        if self.scheme.lowest == "fp8":
            return self.values.view(torch.float8_e4m3fn).float().mul_(self.scales[:, group]).to(dtype)
        w, scale = self.numbers().float(), self.scales.float()[:, group]
        if self.lowest is None:
            w = w.sub_(2 ** (self.scheme.bits - 1)).mul_(scale)
        elif self.scheme.lowest == "zero":
            w = w.sub_(self.lowest.float()[:, group]).mul_(scale)
        else:
            w = w.mul_(scale).add_(self.lowest.float()[:, group])
        return w.to(dtype)

    def _nested_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and minima of each UNIT columns of all groups of a nested scheme: [rows, units] float32 each."""
        assert self.lowest is not None
        halves = self.scales.float().unflatten(1, (-1, NESTED_HALVES, 1))
        scale, minimum = unpack_sixes(self.lowest.unflatten(1, (-1, NESTED_BYTES)))
        return (scale * halves[:, :, 0]).flatten(1), (minimum * -halves[:, :, 1]).flatten(1)


def stack_size(stack: torch.Tensor | QuantisedWeight) -> int:
    """Number of matrices of a stack."""
    return (stack.values if isinstance(stack, QuantisedWeight) else stack).shape[0]


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Pack numbers [rows, cols] from 0 to 15 into nibbles: [rows, cols / 2] uint8."""
    low, high = numbers.unflatten(1, (-1, 2, UNIT // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Unpack nibbles [rows, cols / 2] uint8 into numbers [rows, cols] uint8 from 0 to 15."""
    both = nibbles.unflatten(1, (-1, 1, UNIT // 2))
    return torch.cat((both & 15, both >> 4), dim=2).flatten(1)


def pack_sixes(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Pack scales and minima [..., 8] uint8 from 0 to 63 as Q4_K's blocks have them: [..., 12] uint8.

    Layout: get_scale_min_k4 of https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.
    """
    (scale, later_scale), (minimum, later_minimum) = scale.split(4, dim=-1), minimum.split(4, dim=-1)
    low = scale | later_scale >> 4 << 6, minimum | later_minimum >> 4 << 6
    return torch.cat((*low, later_scale & 15 | (later_minimum & 15) << 4), dim=-1)


def unpack_sixes(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima [..., 8] uint8 that `pack_sixes` packed."""
    low, mid, high = packed.split(4, dim=-1)
    scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    return scale, torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), dim=-1)
