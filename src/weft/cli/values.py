"""What a flag's value may look like: each function reads one text, or says what it should have been."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import error_reason
from weft.formats.yaml_text import load_yaml

MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """A whole number, as vLLM reads one: 4096, 1k = 1000, 1K = 1024, 1.5g, 2G."""
    number, unit = (text[:-1], MULTIPLIERS[text[-1]]) if text[-1:] in MULTIPLIERS else (text, 1)
    with suppress(ValueError, OverflowError):
        value = int(number) if unit == 1 else float(number) * unit
        if value == int(value):
            return int(value)
    raise ArgumentTypeError(f"{text!r} is no whole number (4096, 8k = 8000, 8K = 8192)")


def at_least(minimum: int) -> Callable[[str], int]:
    """A size with a lower limit."""

    def number(text: str) -> int:
        value = size(text)
        if value < minimum:
            raise ArgumentTypeError(f"{text!r} is below {minimum}")
        return value

    return number


def length(text: str) -> int | None:
    """A length in tokens; auto or -1 leaves it to the planner."""
    return None if text in ("auto", "-1") else size(text)


def integers(text: str) -> tuple[int, ...]:
    """20,12"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of whole numbers, as in 20,12") from None


def decimals(text: str) -> tuple[float, ...]:
    """2,1 or 0.9"""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of numbers, as in 2,1") from None


def listed(one: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """Several with commas, each once, in ascending order."""

    def numbers(text: str) -> tuple[float, ...]:
        return tuple(sorted({one(part) for part in text.split(",")}))

    return numbers


def words(text: str) -> tuple[str, ...]:
    """a,b or the JSON list ["a", "b"]"""
    if not text.startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    listed = _json(text)
    if not isinstance(listed, list) or not all(isinstance(part, str) for part in listed):
        raise ArgumentTypeError(f'{text!r} is no list of texts, as in ["a", "b"]')
    return tuple(listed)


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    found = _json(text)
    if not isinstance(found, dict):
        raise ArgumentTypeError(f'{text!r} is no JSON object, as in {{"enable_thinking": false}}')
    return found


def span(text: str) -> tuple[int, int]:
    """32:256, both included; one number stands for both."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no range of lengths, as in 32:256") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise ArgumentTypeError(f"{text!r} is no range of lengths: 1 <= low <= high, as in 32:256")
    return bounds


DEVICE_MAP = (
    "which device holds which module, as Transformers has it: a JSON or YAML file or inline JSON from modules to GPU "
    "numbers, or one of auto balanced balanced_low_0 sequential"
)
MAX_MEMORY = "most that may be taken of each device; a GPU that is not named is not used, as with accelerate"


def device_map(text: str) -> str | dict[str, Any]:
    """A word, a device, {"model.layers.0": 0, ...}, or a file with that."""
    if text.lstrip().startswith("{"):
        return _unique(text, text if len(text) < 40 else "the map")
    path = Path(text)
    if path.suffix.lower() not in (".json", ".yaml", ".yml") and not path.is_file():
        return text
    try:
        return _unique(path.read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"cannot read {text}: {error_reason(error)}") from None


def max_memory(text: str) -> dict[str, Any]:
    """0=40GB,1=40GiB,cpu=64GB, or the same as JSON."""
    if text.lstrip().startswith("{"):
        return _unique(text, text)
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise ArgumentTypeError(f"{part!r} is no DEVICE=SIZE, as in 0=40GB,1=40GB")
        if name in found:
            raise ArgumentTypeError(f"{text!r} has {name} twice")
        found[name] = value
    return found


def _unique(text: str, what: str) -> dict[str, Any]:
    """A JSON or YAML mapping from texts, each of which is there once."""
    try:
        # JSON is YAML, but for tabs.
        found = load_yaml(text.replace("\t", " "))
    except ValueError as error:
        raise ArgumentTypeError(f"{what} is neither JSON nor YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str | int) for key in found):
        raise ArgumentTypeError(f'{what} is no map of modules to devices, as in {{"model.layers.0": 0}}')
    return {str(key): value for key, value in found.items()}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
