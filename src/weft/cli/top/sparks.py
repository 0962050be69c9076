"""Sparklines of `weft top`: the last values of each figure as a line of bars."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from weft.cli.top.watch import TopSnapshot, each_gpu, rows_of_servers

SPARKS = "▁▂▃▄▅▆▇█"
POINTS = 24  # of a sparkline


class Sparks:
    """The values of the last POINTS snapshots."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=POINTS)
        self._values: dict[str, deque[tuple[float, float]]] = {}  # with the time of each

    def add(self, snapshot: TopSnapshot) -> None:
        """Take the figures of one snapshot."""
        self._times_s.append(snapshot.figures["time"])
        for node, gpu in each_gpu(snapshot.figures):
            self._add(gpu_key(node, gpu), gpu["utilization"])
        for url, row in rows_of_servers(snapshot, "models"):
            self._add(model_key(url, row), row["tok_s"])

    def _add(self, name: str, value: float | None) -> None:
        self._values.setdefault(name, deque(maxlen=POINTS)).append((self._times_s[-1], value or 0.0))

    def values(self, name: str) -> list[float]:
        """The values of a figure in the last POINTS snapshots, of which some may not have had it."""
        return [value for time_s, value in self._values.get(name, ()) if time_s >= self._times_s[0]]

    @property
    def window(self) -> str:
        """The time from the first value to the last, as "last 46 s" or "last 2 min"."""
        seconds = self._times_s[-1] - self._times_s[0] if self._times_s else 0.0
        return f"last {seconds:.0f} s" if seconds < 100 else f"last {seconds / 60:.0f} min"

    def line(self, name: str, most: float | None = None) -> str:
        """All values of a figure, none before the second; the highest bar stands for `most`, or the largest value."""
        values = self.values(name)
        if len(values) < 2:
            return ""
        top = max(most or 0.0, *values, 1e-9)
        return "".join(SPARKS[min(len(SPARKS) - 1, int(len(SPARKS) * one / top))] for one in values)


def gpu_key(node: str, gpu: Mapping[str, Any]) -> str:
    return f"gpu {node} {gpu['index']}"


def model_key(url: str, row: Mapping[str, Any]) -> str:
    return f"tok {url} {row['name']}"
