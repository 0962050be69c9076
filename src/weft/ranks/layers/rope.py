"""Rotary position embedding: the table of cosines and sines, for every scaling in `Rope.kind`."""

from __future__ import annotations

import math

import torch

from weft.checkpoint.architectures.shape import Rope


class RopeTable:
    """Cosines and sines (`angles`) of one rotary embedding, shared by all layers that have it.

    They are filled before the first step.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope, self.head_dim = rope, head_dim
        self.angles = torch.empty(0, head_dim)


class RopeTables:
    """One table for each rotary embedding of a model whose own length is `max_positions` tokens."""

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._tables: dict[tuple[Rope, int], RopeTable] = {}

    def table_for(self, rope: Rope, head_dim: int) -> RopeTable:
        """The table of an embedding of heads of this length; the same for each call."""
        return self._tables.setdefault((rope, head_dim), RopeTable(rope, head_dim))

    @property
    def angles(self) -> list[torch.Tensor]:
        """The angles of all tables."""
        return [table.angles for table in self._tables.values()]

    def fill(self, rows: int, length: int, device: torch.device) -> None:
        """Compute the angles of the first `rows` positions, for texts of up to `length` tokens."""
        for table in self._tables.values():
            table.angles = rope_table(table.rope, table.head_dim, self._max_positions, length, rows).to(device)


def rope_table(rope: Rope, head_dim: int, max_positions: int, length: int, rows: int) -> torch.Tensor:
    """Cosines and sines of the first `rows` positions: [rows, head_dim] float32, head_dim/2 cosines, then the sines.

    If heads are rotated in part, the angles of their other rows are 0; `Part.rotated` says how their rows lie.

    `max_positions` is the model's own context length, `length` the longest text that will be served. The base of
    dynamic scaling depends on the length of the text. Keys stay in the cache as they were rotated, so one base serves
    every text: the base for `length`. If `length` is at most
    `max_positions`, the base is exactly Transformers'.
    """
    frequencies, magnitude = inverse_frequencies(rope, rope.rotated_dims(head_dim), max_positions, length)
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), frequencies)
    # In place: for a million positions each copy is half a gigabyte.
    out = torch.empty(rows, head_dim)
    cosines, sines = out.chunk(2, dim=1)
    turned = len(frequencies)
    torch.cos(angles, out=cosines[:, :turned]).mul_(magnitude)
    torch.sin(angles, out=sines[:, :turned]).mul_(magnitude)
    cosines[:, turned:] = 1.0
    sines[:, turned:] = 0.0
    return out


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int, length: int) -> tuple[torch.Tensor, float]:
    """Radians per position, [head_dim/2] float32, and the factor on cosine and sine, 1 except for yarn and longrope."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain, 1.0
        case "none":
            return torch.zeros_like(plain), 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "dynamic":
            longest = max(length, max_positions)
            stretch = rope.factor * longest / max_positions - (rope.factor - 1)
            return 1.0 / ((rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents), 1.0
        case "qwen":
            return _qwen(rope, exponents, head_dim, max(length, max_positions) / max_positions), 1.0
        case "llama3":
            return _llama3(rope, plain, max_positions), 1.0
        case "yarn":
            return _yarn(rope, plain, head_dim, max_positions)
        case "longrope":
            return _longrope(rope, plain, max_positions, length)


def _qwen(rope: Rope, exponents: torch.Tensor, head_dim: int, stretch: float) -> torch.Tensor:
    """Inverse frequencies of Qwen v1's dynamic NTK scaling, for texts `stretch` times as long as it was trained at.

    The factor on the base is one less than the power of two from twice the stretch on.
    """
    alpha = max(2 ** math.ceil(math.log2(stretch) + 1) - 1, 1)
    return 1.0 / ((rope.theta * alpha ** (head_dim / (head_dim - 2))) ** exponents)


def _llama3(rope: Rope, plain: torch.Tensor, max_positions: int) -> torch.Tensor:
    """Inverse frequencies of Llama 3.1: divided by `factor` for long wavelengths, kept for short ones, interpolated
    between. GGUF files give the divisors themselves (`factors`)."""
    if rope.factors is not None:
        return plain / torch.tensor(rope.factors, dtype=torch.float32)
    original = rope.original_max_positions or max_positions
    low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 4.0
    turns = original * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _longrope(rope: Rope, plain: torch.Tensor, max_positions: int, length: int) -> tuple[torch.Tensor, float]:
    """LongRoPE: one divisor per frequency (Ding et al. 2024, arXiv 2402.13753), a set each for short and long texts."""
    original = rope.original_max_positions or max_positions
    factors = rope.long_factors if length > original else rope.short_factors
    magnitude = rope.attention_factor
    if magnitude is None:
        stretch = max_positions / original
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float32), magnitude


def _yarn(rope: Rope, plain: torch.Tensor, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """YaRN: a ramp over the dims between interpolation and extrapolation (Peng et al. 2023, arXiv 2309.00071)."""
    original = rope.original_max_positions or max_positions

    def dim_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast or 32), dim_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # as Transformers does, against a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, rope.magnitude(rope.mscale) / rope.magnitude(rope.mscale_all_dim)
    return frequencies, rope.magnitude(1.0)
