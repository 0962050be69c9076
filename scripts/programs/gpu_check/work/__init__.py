"""Measurements, each in a process of its own: `python -m scripts.programs.gpu_check.work NAME OPTIONS`.

A measurement is a function of a module here, named after the module: it takes its options as one dict and yields
`Figure`s. Every options dict holds `copy_Bps`, the card's copy bandwidth in bytes per second, and `rehearse`, true on a
stand-in for a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A measurement in `unit`, beside the best value that the hardware allows. `ok` is the verdict of a check."""

    name: str
    value: float | None
    unit: str
    roofline: float | None = None
    ok: bool | None = None
    note: str = ""


def is_wanted(options: Options, title: str) -> bool:
    """False for a figure whose name does not begin with `title`, if `options` ask for one figure only."""
    return str(options.get("only", title)).startswith(title)


Measurement = Callable[[Options], Iterator[Figure]]
MEASUREMENTS = (
    "bench", "start", "sleep", "attention", "sampling", "products", "experts", "humming", "symmetric", "nccl",
    "shared", "death", "peers",
)  # fmt: skip


def measurement(name: str) -> Measurement:
    """The function of a name of MEASUREMENTS."""
    assert name in MEASUREMENTS, name
    function: Measurement = getattr(import_module(f"scripts.programs.gpu_check.work.{name}"), name)
    return function
