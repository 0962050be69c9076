"""Comparison of two results: the figures that became better or worse, and by how much."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.errors import ConfigError, error_reason
from weft.regular_files import read_regular_text

# The end of a figure's name says if higher or lower is better; other figures (counts, settings) are not compared.
HIGHER = ("tok_s", "throughput", "goodput", "goodput_share", "per_s")
LOWER = ("_s", "_ms", "_us", "_bytes", "seconds", "failed", "instructions")
# Settings, not measurements: a difference means that the two runs did different work.
SETTINGS = ("task", "model", "model_id", "dtype", "num_prompts", "request_rate", "max_concurrency", "requests")
APART = ("layout", "predicted", "errors", "goodput_limits_ms", "device", "residuals", "runs")
RESULT_BYTES = 100_000_000  # a result of many runs, usually some KB
SPREADS = ("std_", "client_")  # deviations, and figures of the client


class FigureChange(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in both results. `ratio` is above 1 if the new one is better, None if it would divide by 0."""

    name: str
    old: float
    new: float
    higher_is_better: bool

    @property
    def ratio(self) -> float | None:
        over, under = (self.new, self.old) if self.higher_is_better else (self.old, self.new)
        if over == under:
            return 1.0
        return over / under if under else None

    def worse(self, tolerance: float) -> bool:
        """Return True if the figure became worse by more than this share."""
        return self.ratio is not None and self.ratio < 1 - tolerance


def read_result(path: str) -> dict[str, Any]:
    """Read the result in a file: the whole file, or its last line, is a JSON object. Raises ConfigError."""
    try:
        text = read_regular_text(path, RESULT_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}", code="cannot-read-result") from None
    for part in (text, text.rpartition("\n")[2]):
        try:
            result = json.loads(part)
        except ValueError:
            continue
        if isinstance(result, dict):
            return result
    raise ConfigError(
        f"{path} holds no result: neither the file nor its last line is a JSON object", code="no-result-in-file"
    )


def figure_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FigureChange]:
    """Figures that both results have, in the order of the new one."""
    before = dict(_figures(old))
    return [
        FigureChange(name=name, old=before[name], new=value, higher_is_better=is_higher_better(name))
        for name, value in _figures(new)
        if name in before
    ]


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ between the two runs, in words."""
    return [
        f"{name} was {old[name]}, is {new[name]}" for name in SETTINGS if name in old and old[name] != new.get(name)
    ]


def is_higher_better(name: str) -> bool:
    """Return True if a higher value of this figure is better."""
    return name.endswith(HIGHER)


def _figures(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Name and value of each figure; figures inside of others have their names as prefix."""
    for key, value in result.items():
        if key in APART or key.startswith(SPREADS) or key in SETTINGS:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _figures(value, f"{name}: ")
        elif isinstance(value, list):
            yield from _listed_figures(value, name)
        elif _is_figure(key, value):
            yield name, float(value)


def _listed_figures(entries: Sequence[Any], name: str) -> Iterator[tuple[str, float]]:
    for number, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            yield from _figures(entry, f"{entry.get('name', f'{name}.{number}')}: ")


def _is_figure(key: str, value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and key.endswith(HIGHER + LOWER)
