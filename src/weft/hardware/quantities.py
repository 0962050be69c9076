"""Quantities: sizes, speeds and capabilities as a hardware file has them, with their unit."""

from __future__ import annotations

import re
from typing import Any

from weft.errors import ConfigError
from weft.hardware.cluster import MAX_BPS, network_bytes

MOST_BYTES = 1e15  # of memory
LONG = 60  # characters of what is wrong that are told
UNITS = {"b": 1}
UNITS |= {unit: 10 ** (3 * power) for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)}
UNITS |= {unit: 1 << (10 * power) for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)}

_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)


class Bytes(int):
    """24GB, 22.5GiB"""


class Rate(float):
    """936GB/s, 400Gb: bytes per second."""


class Capability(float):
    """8.9: the two numbers that a GPU's compute capability is made of."""

    @property
    def pair(self) -> tuple[int, int]:
        return int(self), round(10 * self) % 10


def parse_quantity(kind: type, told: Any) -> Bytes | Rate | Capability:
    """One of that kind from what YAML makes of it. Raises ValueError where it is none."""
    if kind is Capability:
        if not re.fullmatch(r"\d{1,2}(\.\d)?", str(told)):
            raise ValueError(f"{told!r} is no compute capability, as in 8.9")
        return Capability(told)
    said = repr(told)[:LONG]
    if kind is Rate:
        try:
            return Rate(network_bytes(str(told)))
        except ConfigError:
            most = f"{MAX_BPS / 1e12:.0f}TB/s"
            raise ValueError(
                f"{said} is no speed above 0 with its unit, as in 936GB/s or 400Gb, of {most} at most"
            ) from None
    size = parse_bytes(told)
    if size is None or not 1 <= size <= MOST_BYTES or re.fullmatch(r"[\d.\s]*", str(told)):
        raise ValueError(
            f"{said} is no size above 0 with its unit, as in 24GB or 22.5GiB, of {MOST_BYTES / 1e12:.0f}TB at most"
        )
    return Bytes(size)


def parse_bytes(told: object) -> int | None:
    """Bytes of 40GB (10^9), 40GiB (2^30), 22.5 MB, or a number; a unit is of bytes whatever its case. None for what is
    no size."""
    match = None if isinstance(told, bool) else _SIZE.fullmatch(str(told))
    if match is None or (unit := UNITS.get((match["unit"] or "b").lower())) is None:
        return None
    return int(float(match["number"]) * unit) if "." in match["number"] else int(match["number"]) * unit


def format_quantity(quantity: Any) -> str | float:
    """As `read` takes it; speeds have six digits."""
    if isinstance(quantity, Capability):
        return float(quantity)
    if isinstance(quantity, Rate):
        return f"{six_digits(quantity / 1e9):g}GB/s"
    return f"{quantity >> 20}MiB" if quantity % (1 << 20) == 0 else f"{quantity:d}B"


def six_digits(figure: float) -> float:
    """Six of them."""
    rounded = float(f"{figure:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
