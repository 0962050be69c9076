"""Quantities: sizes, speeds and capabilities as a hardware file has them, with their unit."""

from __future__ import annotations

import re
from typing import Any

from weft.errors import ConfigError
from weft.facts.cluster import MOST_BPS, network_bytes

MOST_BYTES = 1e15  # of memory
LONG = 60  # characters of what is wrong that are told
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Bytes(int):
    """24GB, 22.5GiB"""


class Rate(float):
    """936GB/s, 400Gb: bytes per second."""


class Capability(float):
    """8.9: the two numbers that a GPU's compute capability is made of."""

    @property
    def pair(self) -> tuple[int, int]:
        return int(self), round(10 * self) % 10


def read(kind: type, told: Any) -> Bytes | Rate | Capability:
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
            most = f"{MOST_BPS / 1e12:.0f}TB/s"
            raise ValueError(
                f"{said} is no speed above 0 with its unit, as in 936GB/s or 400Gb, of {most} at most"
            ) from None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)B\s*", str(told), re.IGNORECASE)
    size = float(match[1]) * UNITS.get(match[2].lower(), 0) if match else 0.0
    if not 1 <= size <= MOST_BYTES:
        raise ValueError(
            f"{said} is no size above 0 with its unit, as in 24GB or 22.5GiB, of {MOST_BYTES / 1e12:.0f}TB at most"
        )
    return Bytes(size)


def write(quantity: Any) -> str | float:
    """As `read` takes it; speeds have six digits."""
    if isinstance(quantity, Capability):
        return float(quantity)
    if isinstance(quantity, Rate):
        return f"{digits(quantity / 1e9):g}GB/s"
    return f"{quantity >> 20}MiB" if quantity % (1 << 20) == 0 else f"{quantity:d}B"


def digits(figure: float) -> float:
    """Six of them."""
    rounded = float(f"{figure:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
