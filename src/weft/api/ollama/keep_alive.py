"""Times for which a model stays awake after its last request, as Ollama's clients and variables write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from weft.errors import ConfigError

DEFAULT_S = 300.0  # Ollama's
VARIABLE = "OLLAMA_KEEP_ALIVE"
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")  # part of a duration of Go's


def parse_keep_alive(value: object, source: str) -> float:
    """Seconds of a number or of a text such as "5m", "1h30m" or "300"; infinity for a negative value.

    `source` names the value in the message of the ConfigError that is raised for anything else.
    """
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        seconds = _seconds(value.strip())
    if seconds is None or math.isnan(seconds):
        raise ConfigError(
            f"{source} is {value!r:.60}; give seconds, a time such as 5m or 1h30m, or -1 for no limit",
            code="invalid-keep-alive",
        )
    return math.inf if seconds < 0 else seconds


def default_keep_alive(environment: Mapping[str, str]) -> float:
    """Seconds that OLLAMA_KEEP_ALIVE says, by default five minutes. Raises ConfigError."""
    text = environment.get(VARIABLE, "").strip()
    return parse_keep_alive(text, VARIABLE) if text else DEFAULT_S


def _seconds(text: str) -> float | None:
    """Seconds of a text; None if it is no time."""
    try:
        return float(text)
    except ValueError:
        pass
    sign, parts = (-1, text[1:]) if text.startswith("-") else (1, text)
    amounts = PART.findall(parts)
    if not amounts or "".join(number + unit for number, unit in amounts) != parts:
        return None
    return sign * sum(float(number) * UNITS_S[unit] for number, unit in amounts)
