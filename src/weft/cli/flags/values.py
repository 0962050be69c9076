"""Parsers of flag values. Each takes the text, and raises ArgumentTypeError with the right form for a wrong one."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.files.yaml_text import load_yaml
from weft.errors import error_reason
from weft.regular_files import SETTINGS_BYTES, read_regular_text

MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """A whole number in vLLM's notation: 4096, 1k = 1000, 1K = 1024, 1.5g, 2G."""
    number, unit = (text[:-1], MULTIPLIERS[text[-1]]) if text[-1:] in MULTIPLIERS else (text, 1)
    with suppress(ValueError, OverflowError):
        value = int(number) if unit == 1 else float(number) * unit
        if value == int(value):
            return int(value)
    raise ArgumentTypeError(f"{text!r} is not a whole number, as in 4096, 8k (8,000) or 8K (8,192)")


def at_least(minimum: int) -> Callable[[str], int]:
    """A parser of sizes of at least `minimum`."""

    def number(text: str) -> int:
        value = size(text)
        if value < minimum:
            raise ArgumentTypeError(f"{text!r} is below {minimum}")
        return value

    return number


def length(text: str) -> int | None:
    """A length in tokens; None for auto or -1, which leave it to the planner."""
    return None if text in ("auto", "-1") else size(text)


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas: 20,12."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers, as in 20,12") from None


def device_ids(text: str) -> tuple[int | Literal["cpu"], ...]:
    """Numbers of GPUs with commas, and cpu for the CPU: 0,1 or cpu,0."""
    try:
        return tuple("cpu" if part.strip() == "cpu" else int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of GPUs' numbers, as in 0,1 or cpu,0") from None


def decimals(text: str) -> tuple[float, ...]:
    """Numbers with commas: 2,1 or 0.9."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers, as in 2,1") from None


def ascending(parse_one: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """A parser of values with commas: each once, in ascending order."""

    def numbers(text: str) -> tuple[float, ...]:
        return tuple(sorted({parse_one(part) for part in text.split(",")}))

    return numbers


def words(text: str) -> tuple[str, ...]:
    """Words with commas, a,b, or the JSON list ["a", "b"]."""
    if not text.startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    items = _parse_json(text)
    if not isinstance(items, list) or not all(isinstance(part, str) for part in items):
        raise ArgumentTypeError(f'{text!r} is not a list of strings, as in ["a", "b"]')
    return tuple(items)


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = _parse_json(text)
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'{text!r} is not a JSON object, as in {{"key": "value"}}')
    return value


def span(text: str) -> tuple[int, int]:
    """A range 32:256 with both ends included; one number stands for both ends."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a range of lengths, as in 32:256") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise ArgumentTypeError(f"{text!r} is not a range of lengths: 1 <= low <= high, as in 32:256")
    return bounds


def device_map(text: str) -> str | dict[str, Any]:
    """One of Transformers' words, a device, {"model.layers.0": 0, ...}, or a file that holds such a map."""
    if text.lstrip().startswith("{"):
        return _parse_map(text, text if len(text) < 40 else "the map")
    path = Path(text)
    if path.suffix.lower() not in (".json", ".yaml", ".yml") and not path.is_file():
        return text
    try:
        return _parse_map(read_regular_text(path, SETTINGS_BYTES), text)
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"cannot read {text}: {error_reason(error)}") from None


def max_memory(text: str) -> dict[str, Any]:
    """0=40GB,1=40GiB,cpu=64GB, or the same as JSON."""
    if text.lstrip().startswith("{"):
        return _parse_map(text, text)
    limits: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise ArgumentTypeError(f"{part!r} is not of the form DEVICE=SIZE, as in 0=40GB,1=40GB")
        if name in limits:
            raise ArgumentTypeError(f"{text!r} has {name} twice")
        limits[name] = value
    return limits


def _parse_map(text: str, name: str) -> dict[str, Any]:
    """A JSON or YAML mapping without duplicate keys; errors call it `name`."""
    try:
        # JSON is YAML, except for tabs.
        value = load_yaml(text.replace("\t", " "))
    except ValueError as error:
        raise ArgumentTypeError(f"{name} is neither JSON nor YAML: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str | int) for key in value):
        raise ArgumentTypeError(f'{name} is not a map of modules to devices, as in {{"model.layers.0": 0}}')
    return {str(key): item for key, item in value.items()}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
