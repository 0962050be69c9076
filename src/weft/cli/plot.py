"""Curves in a terminal, and as a picture where matplotlib is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.parser import UsageError
from weft.errors import ConfigError, error_reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "o+x*#@"
BETWEEN = "."
LOG_FROM = 16  # times that an axis' largest value is its smallest, from which it counts in powers


@dataclass(frozen=True)
class Curve:
    """A name and its points, x ascending."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A straight line across a panel at a value, upright or level, with its name."""

    value: float
    name: str
    upright: bool


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a picture; `marks`: the points of the curves are marked."""

    curves: Sequence[Curve]
    x: str
    y: str
    lines: Sequence[Line] = ()
    marks: bool = True


class Axis:
    """From values to places: 0 the least of them, 1 the greatest; in powers where they differ much."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values), max(values)
        self.log = self.low > 0 and self.high >= LOG_FROM * self.low
        if not self.log and self.low > 0:
            self.low = 0.0

    def at(self, value: float) -> float:
        if self.high == self.low:
            return 0.0
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def value(self, at: float) -> float:
        """The other way round."""
        if self.log:
            return float(self.low * (self.high / self.low) ** at)
        return self.low + (self.high - self.low) * at


def terminal(curves: Sequence[Curve], *, x: str, y: str, width: int = 64, height: int = 14) -> list[str]:
    """The curves as lines of text, each with a mark of its own. Nothing where there are no points."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return []
    across, up = Axis([a for a, _ in points]), Axis([b for _, b in points])
    field = [[" "] * width for _ in range(height)]

    def put(a: float, b: float, mark: str) -> None:
        row, column = height - 1 - round(b * (height - 1)), round(a * (width - 1))
        if mark != BETWEEN or field[row][column] == " ":
            field[row][column] = mark

    for number, curve in enumerate(curves):
        places = [(across.at(a), up.at(b)) for a, b in curve.points]
        for (a, b), (c, d) in pairwise(places):
            steps = max(1, round(max(abs(c - a) * width, abs(d - b) * height)))
            for step in range(1, steps):
                put(a + (c - a) * step / steps, b + (d - b) * step / steps, BETWEEN)
        for a, b in places:
            put(a, b, MARKS[number % len(MARKS)])
    ticks = {row: f"{up.value(1 - row / (height - 1)):.3g}" for row in (0, height // 2, height - 1)}
    margin = max(map(len, ticks.values()))
    lines = [f"{y}"] + [f"{ticks.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(field)]
    left, middle, right = (f"{across.value(at):.3g}" for at in (0.0, 0.5, 1.0))
    scale = left + middle.center(width - len(left) - len(right)) + right
    lines += [f"{'':{margin}} +{'-' * width}", f"{'':{margin}}  {scale}  {x}"]
    return [*lines, "   ".join(f"{MARKS[n % len(MARKS)]} {curve.name}" for n, curve in enumerate(curves))]


def check(path: str) -> None:
    """Raises UsageError where no picture can be written to a file of this name."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot draws with matplotlib, which is not installed (pip install matplotlib)")
    from matplotlib.backend_bases import FigureCanvasBase

    file, kinds = Path(path).absolute(), sorted(FigureCanvasBase.get_supported_filetypes())
    if not file.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {file.parent}")
    if file.suffix and file.suffix[1:].lower() not in kinds:
        raise UsageError(f"--plot {path}: {file.suffix} is no kind of picture; give one of {' '.join(kinds)}")


def picture(path: str, panels: Sequence[Panel], *, title: str) -> None:
    """Write the panels, one below the other, to a file of the kind that its name ends in. Raises ConfigError."""
    # Figure and not pyplot, which asks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 4 * len(panels)), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        _draw_panel(figure.add_subplot(len(panels), 1, number, xlabel=panel.x, ylabel=panel.y), panel)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error_reason(error)}") from None


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        marker = "o" if panel.marks else None
        axes.plot([a for a, _ in curve.points], [b for _, b in curve.points], marker=marker, label=curve.name)
    for number, line in enumerate(panel.lines):
        draw = axes.axvline if line.upright else axes.axhline
        draw(line.value, linestyle="--", color=f"C{len(panel.curves) + number}", label=line.name)
    points = [point for curve in panel.curves for point in curve.points]
    if points and Axis([a for a, _ in points]).log:
        axes.set_xscale("log")
    if points and Axis([b for _, b in points]).log:
        axes.set_yscale("log")
    elif points:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if panel.curves or panel.lines:
        axes.legend()
