"""Two results side by side: which figures got better, which worse, and by how much."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError, error_reason

# How a figure's name ends says which way is better; figures of other names (counts, settings) are not compared.
HIGHER = ("tok_s", "throughput", "goodput", "goodput_share", "per_s")
LOWER = ("_s", "_ms", "_us", "_bytes", "seconds", "failed", "instructions")
# Of the same work, and no measurements: a difference is one of the two runs' settings.
SETTINGS = ("task", "model", "model_id", "dtype", "num_prompts", "request_rate", "max_concurrency", "requests")
APART = ("layout", "predicted", "errors", "goodput_limits_ms", "device", "residuals", "runs")
SPREADS = ("std_", "client_")  # say how sure a figure is, or are of the client


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `ratio` is above 1 where the new one is better; None where the old one is 0."""

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
        """Whether it lost more than that share."""
        if self.ratio is None:
            return False
        return self.ratio < 1 - tolerance


def read(path: str) -> dict[str, Any]:
    """The result in a file: all of it, or its last line. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}") from None
    for part in (text, text.rpartition("\n")[2]):
        try:
            found = json.loads(part)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise ConfigError(f"{path} holds no result: neither the file nor its last line is a JSON object")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The figures that both have, in the new one's order."""
    before = dict(_figures(old))
    return [
        Change(name=name, old=before[name], new=value, higher_is_better=higher(name))
        for name, value in _figures(new)
        if name in before
    ]


def settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What was not the same in the two runs, in words."""
    return [
        f"{name} was {old[name]}, is {new[name]}" for name in SETTINGS if name in old and old[name] != new.get(name)
    ]


def higher(name: str) -> bool:
    """Whether more of it is better."""
    return name.endswith(HIGHER)


def _figures(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Name and value of each figure; inside of others, after their names."""
    for key, value in result.items():
        if key in APART or key.startswith(SPREADS) or key in SETTINGS:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _figures(value, f"{name}: ")
        elif isinstance(value, list):
            for number, part in enumerate(value):
                if isinstance(part, Mapping):
                    yield from _figures(part, f"{part.get('name', f'{name}.{number}')}: ")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key.endswith(HIGHER + LOWER):
            yield name, float(value)
