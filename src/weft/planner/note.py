"""Note: a statement about a plan as a code with values; data/sentences.toml has the wording of every code."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Any

import msgspec

from weft.formatting import format_bytes, format_factor, format_version, join_commas

_FORMATS: dict[str, Callable[[Any], str]] = {
    "gigabytes": format_bytes,
    "times": format_factor,
    "milliseconds": lambda seconds: f"{1000 * seconds:,.1f} ms",
    "commas": join_commas,
    "dotted": format_version,
    "list": lambda values: ", ".join(map(str, values)),
}


class Note(msgspec.Struct, frozen=True):
    """`code` names the statement, `values` are the figures and names in it. `str(note)` is its sentence."""

    code: str
    values: dict[str, Any] = {}

    def __str__(self) -> str:
        return _Sentences().vformat(templates()[self.code], (), self.values)


def create_note(code: str, **values: Any) -> Note:
    """A note with a code of the catalogue."""
    assert code in templates(), f"data/sentences.toml has no sentence {code!r}"
    return Note(code, values)


@cache
def templates() -> dict[str, str]:
    """The template of every code. The catalogue's sections only group them."""
    sections = tomllib.loads((files("weft.planner") / "data/sentences.toml").read_text())
    return {code: template for section in sections.values() for code, template in section.items()}


class _Sentences(Formatter):
    """`str.format` with formats of ours: {size:gigabytes}, and others of _FORMATS; {flag:?if true|if not};
    {count:#one|other than one}. The words of the last two may have fields of their own."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        if format_spec.startswith(("?", "#")):
            first, _, second = format_spec[1:].partition("|")
            chosen = value == 1 if format_spec[0] == "#" else bool(value)
            return first if chosen else second
        return str(super().format_field(value, format_spec))
