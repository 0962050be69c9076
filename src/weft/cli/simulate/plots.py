"""Plots of weft simulate: the distribution of one run's times, or the times of several runs against the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.cli import plot
from weft.cli.plot import Curve, Panel, ReferenceLine
from weft.study.simulate.capacity_search import CapacityResult
from weft.study.simulate.objective import LatencyTarget
from weft.study.simulate.report import Report
from weft.study.simulate.study import Study

METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "ITL": "itl_s", "whole answer": "e2e_s", "queue": "queue_s"}
ALWAYS = ("TTFT", "TPOT")  # drawn even if they are not promised
PERCENTILES = ("p50", "p95", "p99")


def text_plots(runs: Sequence[Report]) -> list[list[str]]:
    """Times against the load as text, a plot for each metric."""
    axis, positions = load_axis(runs)
    return [
        plot.text_plot(percentile_curves(METRICS[name], runs, positions), x=axis, y=f"{name}, ms") for name in ALWAYS
    ]


def write_plots(path: str, title: str, study: Study, runs: Sequence[Report], capacity: CapacityResult | None) -> None:
    """Write an image: of one run the distributions of its times, of several their times against the load."""
    targets = study.objective.targets if study.objective else ()
    if len(runs) == 1:
        panels = [distribution_panel(name, runs[0], targets) for name in drawn_metrics(targets)]
        title = f"{title}\n{load_text(runs[0])}"
    else:
        panels = [load_panel(name, runs, study, targets, capacity) for name in drawn_metrics(targets)]
    plot.write_image(path, panels, title=title)


def drawn_metrics(targets: Sequence[LatencyTarget]) -> list[str]:
    """Names of the metrics to draw: TTFT, TPOT, and the others of the promise."""
    fields = {target_field(target) for target in targets}
    return [name for name, field in METRICS.items() if name in ALWAYS or field in fields]


def target_field(target: LatencyTarget) -> str:
    """The report's field of a target."""
    return f"{target.metric}_s"


def load_text(run: Report) -> str:
    """The load of one run, for a title."""
    replicas = f"{run.replicas:,} replica{'s' * (run.replicas > 1)}"
    return f"{run.users:,} users, {replicas}" if run.users else f"{run.rate or 0:.4g} requests/s, {replicas}"


def distribution_panel(name: str, run: Report, targets: Sequence[LatencyTarget]) -> Panel:
    """Share of the requests that waited at most a time, with the promised times as lines."""
    field = METRICS[name]
    times = run.distributions.get(field)
    points = [(1000 * seconds, float(percent)) for percent, seconds in enumerate(times.percentiles_s)] if times else []
    promised = [
        ReferenceLine(1000 * target.limit_s, f"promised: {target}", upright=True)
        for target in targets
        if target_field(target) == field
    ]
    shares = [
        ReferenceLine(target.percent, f"{target.percent:g} %", upright=False)
        for target in targets
        if target_field(target) == field and target.percent is not None
    ]
    return Panel(
        [Curve(name, points)],
        x=f"{name}, ms",
        y="% of requests at most this long",
        lines=[*promised, *shares],
        marks=False,
    )


def load_panel(
    name: str, runs: Sequence[Report], study: Study, targets: Sequence[LatencyTarget], capacity: CapacityResult | None
) -> Panel:
    """Percentiles of one metric against the load, with lines for the promise, the result of --find and saturation."""
    axis, positions = load_axis(runs)
    field = METRICS[name]
    lines = [
        ReferenceLine(1000 * target.limit_s, f"promised: {target}", upright=False)
        for target in targets
        if target_field(target) == field
    ]
    if capacity is not None and capacity.value is not None:
        lines.append(ReferenceLine(float(capacity.value), f"found: {capacity.value:.4g} {axis}", upright=True))
    if axis == "requests/s":
        saturation = study.capacity * len(study.specs)
        lines.append(ReferenceLine(saturation, f"predicted saturation: {saturation:.3g} requests/s", upright=True))
    return Panel(percentile_curves(field, runs, positions), x=axis, y=f"{name}, ms", lines=lines)


def percentile_curves(field: str, runs: Sequence[Report], position: Callable[[Report], float]) -> list[Curve]:
    """A curve for each percentile, in milliseconds."""
    rows = [(position(run), getattr(run, field)) for run in runs]
    return [Curve(q, [(load, 1000 * getattr(spread, q)) for load, spread in rows if spread]) for q in PERCENTILES]


def load_axis(runs: Sequence[Report]) -> tuple[str, Callable[[Report], float]]:
    """The name of the quantity that differs between the runs, and a function that gives its value for a run."""
    if len({run.replicas for run in runs}) > 1:
        return "replicas", lambda run: float(run.replicas)
    return "requests/s", lambda run: run.rate or 0.0
