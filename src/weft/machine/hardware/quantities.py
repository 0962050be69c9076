"""Sizes, rates and compute capabilities with units, in hardware files, `--max-memory` and `--network`."""

from __future__ import annotations

import re
from typing import Any

from weft.errors import ConfigError

# Larger figures are typing errors.
MAX_BPS = 1e15  # bytes per second
MAX_MEMORY_BYTES = 1e15
MAX_QUOTED = 60  # characters of a wrong value that an error quotes
UNITS = {"b": 1}
UNITS |= {unit: 10 ** (3 * power) for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)}
UNITS |= {unit: 1 << (10 * power) for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)}

_RATE = re.compile(r"\s*(?P<number>[-+]?\d+(?:\.\d+)?)\s*(?P<unit>[a-z/]*)\s*", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)


class Bytes(int):
    """A size, as in 24GB or 22.5GiB."""


class Rate(float):
    """Bytes per second, written as 936GB/s (bytes) or 400Gb (bits, divided by 8)."""


class Capability(float):
    """A GPU's compute capability, as in 8.9."""

    @property
    def pair(self) -> tuple[int, int]:
        """Major and minor number."""
        return int(self), round(10 * self) % 10


def parse_quantity(kind: type, value: Any) -> Bytes | Rate | Capability:
    """Convert a value from a YAML file to type `kind`: msgspec's dec_hook of hardware files.

    Raises ValueError that says what is wrong.
    """
    if kind is Capability:
        if not re.fullmatch(r"\d{1,2}(\.\d)?", str(value)):
            raise ValueError(f"{repr(value)[:MAX_QUOTED]} is not a compute capability; write it as 8.9")
        return Capability(value)
    return _rate_of(value) if kind is Rate else _size_of(value)


def _rate_of(value: Any) -> Rate:
    try:
        return Rate(parse_rate(str(value), "rate"))
    except ConfigError:
        raise ValueError(
            f"{repr(value)[:MAX_QUOTED]} is not a speed with a unit; write it as 936GB/s or 400Gb, above 0 and at most "
            f"{MAX_BPS / 1e12:.0f}TB/s"
        ) from None


def _size_of(value: Any) -> Bytes:
    size = parse_bytes(value)
    # Required here, where 24 might mean GB; `--max-memory` takes a plain number as bytes.
    without_unit = re.fullmatch(r"[\d.\s]*", str(value))
    if size is None or without_unit or not 1 <= size <= MAX_MEMORY_BYTES:
        raise ValueError(
            f"{repr(value)[:MAX_QUOTED]} is not a size with a unit; write it as 24GB or 22.5GiB, above 0 and at most "
            f"{MAX_MEMORY_BYTES / 1e12:.0f}TB"
        )
    return Bytes(size)


def parse_rate(text: str, name: str) -> float:
    """Bytes per second of `400Gb`, `100GbE`, `25Gbit/s` (bits) or `50GB`, `50GB/s` (bytes).

    Raises ConfigError, whose message begins with `name`.
    """
    match = _RATE.fullmatch(text)
    if match is None or float(match["number"]) <= 0:
        raise ConfigError(
            f"{name} {text!r} is not a speed above 0; write it as 400Gb (bits) or 50GB (bytes)",
            code="bad-network-speed",
        )
    unit = re.sub(r"(ps|/s|/sec)$", "", match["unit"])
    scale = {"g": 1e9, "m": 1e6, "t": 1e12}.get(unit[:1].lower())
    if scale is None or unit[1:] not in ("b", "B", "bit", "bits", "it", "bE", "be", "BE", "byte", "bytes"):
        raise ConfigError(
            f"{name} {text!r} has the unknown unit {match['unit']!r}; write it as 400Gb (bits) or 50GB (bytes)",
            code="unknown-network-unit",
        )
    in_bytes = unit[1:] in ("B", "byte", "bytes")
    Bps = float(match["number"]) * scale / (1 if in_bytes else 8)
    if Bps > MAX_BPS:
        raise ConfigError(
            f"{name} {text[:MAX_QUOTED]!r} is more than {MAX_BPS / 1e12:.0f}TB per second, the most that a plan takes",
            code="network-too-fast",
        )
    return Bps


def parse_bytes(value: object) -> int | None:
    """Bytes of 40GB (10^9), 40GiB (2^30), 22.5 MB, or of a number; None if `value` is not a size.

    Case is ignored: 40gb and 40Gb are 40 GB. In rates it is not: there `b` is bits.
    """
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
    if match is None:
        return None
    unit = UNITS.get((match["unit"] or "b").lower())
    if unit is None:
        return None
    return int(float(match["number"]) * unit) if "." in match["number"] else int(match["number"]) * unit


def format_quantity(quantity: Any) -> str | float:
    """Format a quantity so that `parse_quantity` reads it; rates keep six significant digits."""
    if isinstance(quantity, Capability):
        return float(quantity)
    if isinstance(quantity, Rate):
        return f"{six_digits(quantity / 1e9):g}GB/s"
    return f"{quantity >> 20}MiB" if quantity % (1 << 20) == 0 else f"{quantity:d}B"


def six_digits(figure: float) -> float:
    """Round to six significant digits."""
    rounded = float(f"{figure:.6g}")
    return int(rounded) if rounded.is_integer() else rounded
