"""Plots: curves as text in a terminal, or as an image file, which needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
BETWEEN = "."  # between the points of a curve
LOG_FROM = 16  # ratio of the largest to the smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class Curve:
    """A named curve; its points (x, y) are in ascending order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ReferenceLine:
    """A named straight line across a panel: vertical at x = `value` if `upright`, else horizontal at y = `value`."""

    value: float
    name: str
    upright: bool


@dataclass(frozen=True)
class Panel:
    """One pair of axes of an image; with `marks` the points of the curves are marked."""

    curves: Sequence[Curve]
    x: str
    y: str
    lines: Sequence[ReferenceLine] = ()
    marks: bool = True


class PlotAxis:
    """Positions of values on an axis: 0 for the smallest, 1 for the largest; logarithmic if they differ much."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values), max(values)
        self.log = self.low > 0 and self.high >= LOG_FROM * self.low
        if not self.log and self.low > 0:
            self.low = 0.0

    def position(self, value: float) -> float:
        """Position of a value, from 0 to 1."""
        if self.high == self.low:
            return 0.0
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def value(self, position: float) -> float:
        """Value at a position."""
        if self.log:
            return float(self.low * (self.high / self.low) ** position)
        return self.low + (self.high - self.low) * position


def coordinates(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """The x and the y of all points."""
    points = [point for curve in curves for point in curve.points]
    return [x for x, _ in points], [y for _, y in points]


def text_plot(curves: Sequence[Curve], *, x: str, y: str, width: int = 64, height: int = 14) -> list[str]:
    """The curves as lines of text, each curve with its own mark; no lines if there are no points.

    `x` and `y` name the axes. `width` and `height` are the field's, in characters.
    """
    all_x, all_y = coordinates(curves)
    if not all_x:
        return []
    across, up = PlotAxis(all_x), PlotAxis(all_y)
    field = [[" "] * width for _ in range(height)]
    for number, curve in enumerate(curves):
        positions = [(across.position(a), up.position(b)) for a, b in curve.points]
        _draw_curve(field, positions, MARKS[number % len(MARKS)])
    ticks = {row: f"{up.value(1 - row / (height - 1)):.3g}" for row in (0, height // 2, height - 1)}
    margin = max(map(len, ticks.values()))
    rows = [f"{ticks.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(field)]
    left, middle, right = (f"{across.value(position):.3g}" for position in (0.0, 0.5, 1.0))
    scale = left + middle.center(width - len(left) - len(right)) + right
    legend = "   ".join(f"{MARKS[n % len(MARKS)]} {curve.name}" for n, curve in enumerate(curves))
    return [y, *rows, f"{'':{margin}} +{'-' * width}", f"{'':{margin}}  {scale}  {x}", legend]


def _draw_curve(field: list[list[str]], positions: Sequence[tuple[float, float]], mark: str) -> None:
    """Put a mark at each position into the field, and dots between them if the place is empty."""
    height, width = len(field), len(field[0])

    def put(a: float, b: float, sign: str) -> None:
        row, column = height - 1 - round(b * (height - 1)), round(a * (width - 1))
        if sign != BETWEEN or field[row][column] == " ":
            field[row][column] = sign

    for (a, b), (c, d) in pairwise(positions):
        steps = max(1, round(max(abs(c - a) * width, abs(d - b) * height)))
        for step in range(1, steps):
            put(a + (c - a) * step / steps, b + (d - b) * step / steps, BETWEEN)
    for a, b in positions:
        put(a, b, mark)


def check_image_path(path: str) -> None:
    """Raise UsageError if no image can be written to a file of this name."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot draws with matplotlib, which is not installed (pip install matplotlib)", code="matplotlib-missing"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    file, kinds = Path(path).absolute(), sorted(FigureCanvasBase.get_supported_filetypes())
    if not file.parent.is_dir():
        raise UsageError(f"--plot {path}: the directory {file.parent} does not exist", code="folder-missing")
    if file.suffix and file.suffix[1:].lower() not in kinds:
        raise UsageError(
            f"--plot {path}: {file.suffix} is not an image format; use one of {' '.join(kinds)}",
            code="unknown-image-format",
        )


def write_image(path: str, panels: Sequence[Panel], *, title: str) -> None:
    """Write the panels, one below the other, in the format of the file's ending. Raises ConfigError."""
    # Figure instead of pyplot, which needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 4 * len(panels)), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, number, xlabel=panel.x, ylabel=panel.y)
        _draw_panel(axes, panel, line_colors(panels))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error_reason(error)}", code="cannot-write-output") from None


def line_colors(panels: Sequence[Panel]) -> dict[str, str]:
    """A colour for each name of a reference line, the same in all panels and different from the curves'."""
    names = dict.fromkeys(line.name for panel in panels for line in panel.lines)
    curves = max(len(panel.curves) for panel in panels)
    return {name: f"C{number}" for number, name in enumerate(names, curves)}


def _draw_panel(axes: Axes, panel: Panel, colors: Mapping[str, str]) -> None:
    for curve in panel.curves:
        axes.plot(*coordinates([curve]), marker="o" if panel.marks else None, label=curve.name)
    for line in panel.lines:
        draw = axes.axvline if line.upright else axes.axhline
        draw(line.value, linestyle="--", color=colors[line.name], label=line.name)
    _set_scales(axes, panel)
    axes.grid(visible=True, alpha=0.3)
    if panel.curves or panel.lines:
        axes.legend()


def _set_scales(axes: Axes, panel: Panel) -> None:
    across, up = coordinates(panel.curves)
    if not across:
        return
    if PlotAxis(across).log:
        axes.set_xscale("log")
    if PlotAxis(up).log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
