"""Pictures of weft simulate: the distribution of one run's times, or times against the load of several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.cli import plot
from weft.cli.plot import Curve, Line, Panel
from weft.simulate.capacity_search import CapacityResult
from weft.simulate.objective import LatencyTarget
from weft.simulate.report import Report
from weft.simulate.study import Study

METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "ITL": "itl_s", "whole answer": "e2e_s", "queue": "queue_s"}
ALWAYS = ("TTFT", "TPOT")  # drawn whatever is promised
PERCENTILES = ("p50", "p95", "p99")


def on_terminal(runs: Sequence[Report]) -> list[list[str]]:
    """Times against the load, as text."""
    axis, positions = load_axis(runs)
    return [
        plot.terminal(percentile_curves(METRICS[name], runs, positions), x=axis, y=f"{name}, ms") for name in ALWAYS
    ]


def draw(path: str, title: str, study: Study, runs: Sequence[Report], found: CapacityResult | None) -> None:
    """Write the picture that says most of these runs."""
    targets = study.objective.targets if study.objective else ()
    if len(runs) == 1:
        panels = [distribution_panel(name, runs[0], targets) for name in drawn_metrics(targets)]
        title = f"{title}\n{load_text(runs[0])}"
    else:
        panels = [load_panel(name, runs, study, targets, found) for name in drawn_metrics(targets)]
    plot.picture(path, panels, title=title)


def drawn_metrics(targets: Sequence[LatencyTarget]) -> list[str]:
    """TTFT, TPOT, and every other metric of the promise."""
    fields = {target_field(target) for target in targets}
    return [name for name, field in METRICS.items() if name in ALWAYS or field in fields]


def target_field(target: LatencyTarget) -> str:
    """The report's field that a target is about."""
    return f"{target.metric}_s"


def load_text(run: Report) -> str:
    """The load of one run, for a title."""
    replicas = f"{run.replicas:,} replica{'s' * (run.replicas > 1)}"
    return f"{run.users:,} users, {replicas}" if run.users else f"{run.rate or 0:.4g} requests/s, {replicas}"


def distribution_panel(name: str, run: Report, targets: Sequence[LatencyTarget]) -> Panel:
    """Share of the requests that waited no longer than a time, with the promised times as lines."""
    field = METRICS[name]
    known = run.distributions.get(field)
    points = [(1000 * at, float(percent)) for percent, at in enumerate(known.percentiles_s)] if known else []
    promised = [
        Line(1000 * target.limit_s, f"promised: {target}", upright=True)
        for target in targets
        if target_field(target) == field
    ]
    shares = [
        Line(target.percent, f"{target.percent:g} %", upright=False)
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
    name: str, runs: Sequence[Report], study: Study, targets: Sequence[LatencyTarget], found: CapacityResult | None
) -> Panel:
    """Percentiles of one metric against the load, with the promise, the value found and the predicted saturation."""
    axis, positions = load_axis(runs)
    field = METRICS[name]
    lines = [
        Line(1000 * target.limit_s, f"promised: {target}", upright=False)
        for target in targets
        if target_field(target) == field
    ]
    if found is not None and found.value is not None:
        lines.append(Line(float(found.value), f"found: {found.value:.4g} {axis}", upright=True))
    if axis == "requests/s":
        saturation = study.capacity * len(study.specs)
        lines.append(Line(saturation, f"predicted saturation: {saturation:.3g} requests/s", upright=True))
    return Panel(percentile_curves(field, runs, positions), x=axis, y=f"{name}, ms", lines=lines)


def percentile_curves(field: str, runs: Sequence[Report], position: Callable[[Report], float]) -> list[Curve]:
    """A curve for each percentile, in milliseconds."""
    rows = [(position(run), getattr(run, field)) for run in runs]
    return [Curve(q, [(at, 1000 * getattr(spread, q)) for at, spread in rows if spread]) for q in PERCENTILES]


def load_axis(runs: Sequence[Report]) -> tuple[str, Callable[[Report], float]]:
    """The name of what differs between the runs, and its value of a run."""
    if len({run.replicas for run in runs}) > 1:
        return "replicas", lambda run: float(run.replicas)
    return "requests/s", lambda run: run.rate or 0.0
