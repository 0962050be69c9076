"""Quantities of a hardware file: sizes and speeds with their unit, and compute capabilities."""

from __future__ import annotations

import re
from typing import Any

from weft.errors import ConfigError
from weft.hardware.cluster import MAX_BPS, network_bytes

MAX_MEMORY_BYTES = 1e15
MAX_QUOTED = 60  # characters of a wrong value that an error quotes
UNITS = {"b": 1}
UNITS |= {unit: 10 ** (3 * power) for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)}
UNITS |= {unit: 1 << (10 * power) for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)}

_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)


class Bytes(int):
    """A size, as in 24GB or 22.5GiB."""


class Rate(float):
    """Bytes per second, as in 936GB/s or 400Gb."""


class Capability(float):
    """A GPU's compute capability, as in 8.9."""

    @property
    def pair(self) -> tuple[int, int]:
        """Major and minor number."""
        return int(self), round(10 * self) % 10


def parse_quantity(kind: type, value: Any) -> Bytes | Rate | Capability:
    """Convert a value that YAML has read to `kind`. Raises ValueError that says what is wrong."""
    if kind is Capability:
        if not re.fullmatch(r"\d{1,2}(\.\d)?", str(value)):
            raise ValueError(f"{value!r} is not a compute capability; write it as 8.9")
        return Capability(value)
    return _parse_rate(value) if kind is Rate else _parse_size(value)


def _parse_rate(value: Any) -> Rate:
    try:
        return Rate(network_bytes(str(value)))
    except ConfigError:
        raise ValueError(
            f"{repr(value)[:MAX_QUOTED]} is not a speed with a unit; write it as 936GB/s or 400Gb, above 0 and at most "
            f"{MAX_BPS / 1e12:.0f}TB/s"
        ) from None


def _parse_size(value: Any) -> Bytes:
    size = parse_bytes(value)
    without_unit = re.fullmatch(r"[\d.\s]*", str(value))
    if size is None or without_unit or not 1 <= size <= MAX_MEMORY_BYTES:
        raise ValueError(
            f"{repr(value)[:MAX_QUOTED]} is not a size with a unit; write it as 24GB or 22.5GiB, above 0 and at most "
            f"{MAX_MEMORY_BYTES / 1e12:.0f}TB"
        )
    return Bytes(size)


def parse_bytes(value: object) -> int | None:
    """Bytes of 40GB (10^9), 40GiB (2^30), 22.5 MB, or of a number; None if `value` is not a size.

    Units mean bytes in upper and lower case.
    """
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
    if match is None:
        return None
    unit = UNITS.get((match["unit"] or "b").lower())
    if unit is None:
        return None
    return int(float(match["number"]) * unit) if "." in match["number"] else int(match["number"]) * unit


def format_quantity(quantity: Any) -> str | float:
    """Format a quantity so that `parse_quantity` reads it; speeds have six digits."""
    if isinstance(quantity, Capability):
        return float(quantity)
    if isinstance(quantity, Rate):
        return f"{six_digits(quantity / 1e9):g}GB/s"
    return f"{quantity >> 20}MiB" if quantity % (1 << 20) == 0 else f"{quantity:d}B"


def six_digits(figure: float) -> float:
    """Round to six significant digits."""
    rounded = float(f"{figure:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
