"""What a flag's value may look like: each function reads one text, or says what it should have been."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """A whole number, as vLLM reads one: 4096, 1k = 1000, 1K = 1024, 1.5g, 2G."""
    number, unit = (text[:-1], MULTIPLIERS[text[-1]]) if text[-1:] in MULTIPLIERS else (text, 1)
    try:
        value = int(number) if unit == 1 else float(number) * unit
        whole = int(value)
    except (ValueError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is no number (4096, 8k = 8000, 8K = 8192)") from None
    if whole != value:
        raise ArgumentTypeError(f"{text!r} is no whole number")
    return whole


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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
