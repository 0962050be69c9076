"""weft bench sweep: several loads on the same server, one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import inf
from typing import Any

from weft.cli.bench.serve import LoadPoint, check_settings, exit_status, measure_load, open_target, save_result
from weft.cli.bench.view import aligned, number
from weft.cli.flags.bench_flags import Points, SweepArguments
from weft.cli.parser import UsageError
from weft.cli.plot import Curve, Panel, check_image_path, text_plot, write_image
from weft.study.bench.summary import load_warnings

CURVES = {  # plots: the unit, and the field of each curve by name
    "times": ("ms", {"median TTFT": "median_ttft_ms", "p95 TTFT": "p95_ttft_ms", "p95 TPOT": "p95_tpot_ms"}),
    "output": ("tokens/s", {"output tokens/s": "output_throughput"}),
}


def main(arguments: SweepArguments) -> int:
    """Measure every load and print the table and plots; return 1 if a load got no answer, 130 after Ctrl-C."""
    by, points = load_points(arguments.points)
    if path := arguments.report.plot:
        check_image_path(path)
    settings = check_settings(arguments)
    results: list[dict[str, Any]] = []
    with open_target(arguments) as target:
        for number, point in enumerate(points):
            result = measure_load(settings, target, point, number)
            results.append({"name": f"{axis_name(by)} {cell_text(result[by])}", **result})
            print(progress_line(by, result), file=sys.stderr)
            if result["interrupted"]:
                break
    model = results[0]["model_id"]
    whole = {"task": "sweep", "by": by, "model_id": model, "points": results}
    save_result(arguments, whole)
    if arguments.report.json:
        print(json.dumps(whole))
    else:
        print("\n".join(report_lines(by, results)))
    if path:
        unit, names = CURVES["times"]
        panel = Panel(curves(by, results, names), x=axis_name(by), y=unit)
        write_image(path, [panel], title=f"{model}, {load_text(results)}")
    return exit_status(results)


def load_points(flags: Points) -> tuple[str, list[LoadPoint]]:
    """The field that varies, `request_rate` or `max_concurrency`, and the loads. Raises UsageError for none or both."""
    rates, limits = flags.request_rate, flags.max_concurrency
    _check_varied(rates, limits)
    if len(rates) > 1 or not limits:
        return "request_rate", _points_by_rate(rates, limits, flags.burstiness)
    rate = rates[0] if rates else inf
    return "max_concurrency", [LoadPoint(rate, flags.burstiness, int(limit)) for limit in limits]


def _points_by_rate(rates: Sequence[float], limits: Sequence[float], burstiness: float) -> list[LoadPoint]:
    """A load for each rate; `limits` are one number of requests at most, or none."""
    limit = int(limits[0]) if limits else None
    return [LoadPoint(rate, burstiness, limit) for rate in rates]


def _check_varied(rates: Sequence[float], limits: Sequence[float]) -> None:
    """Raise UsageError if both loads vary, or if there is none."""
    if len(rates) > 1 and len(limits) > 1:
        raise UsageError(
            "--request-rate and --max-concurrency both have several values; vary one of them", code="two-varied-loads"
        )
    if not rates and not limits:
        raise UsageError("which loads? Give --request-rate 1,2,4,8 or --max-concurrency 1,4,16", code="load-missing")


def progress_line(by: str, result: dict[str, Any]) -> str:
    """The result of one load in a line."""
    return (
        f"{axis_name(by)} {cell_text(result[by])}: {result['completed']} of {result['num_prompts']} answered, TTFT "
        f"{number(result['median_ttft_ms'])} ms, {number(result['output_throughput'])} tokens/s"
    )


def report_lines(by: str, results: Sequence[dict[str, Any]]) -> list[str]:
    """The table, warnings, and the plots as text."""
    columns = {
        axis_name(by): by,
        "answered": "completed",
        "failed": "failed",
        "requests/s": "request_throughput",
        "tokens/s": "output_throughput",
        "TTFT ms": "median_ttft_ms",
        "p95": "p95_ttft_ms",
        "TPOT ms": "median_tpot_ms",
        "p95 ": "p95_tpot_ms",
        "E2EL ms": "median_e2el_ms",
        "p95  ": "p95_e2el_ms",
    }
    if results[0]["request_goodput"] is not None:
        columns["goodput/s"] = "request_goodput"
    rows = [[cell_text(result[key]) for key in columns.values()] for result in results]
    lines = [f"{results[0]['model_id']}: {load_text(results)}", "", *aligned([*columns], rows)]
    for result in results:
        load = f"{axis_name(by)} {cell_text(result[by])}"
        lines += [f"warning: {load}: {text}" for text in load_warnings(result, result["num_prompts"])]
    for unit, names in CURVES.values():
        lines += ["", *text_plot(curves(by, results, names), x=axis_name(by), y=unit)]
    return lines


def load_text(results: Sequence[dict[str, Any]]) -> str:
    """The number and mean length of the requests of each load."""
    first = results[0]
    whole = max(first["completed"], 1)
    return (
        f"{first['num_prompts']} requests each, about {first['total_input_tokens'] // whole:,} + "
        f"{first['total_output_tokens'] // whole:,} tokens"
    )


def axis_name(by: str) -> str:
    """The name of the field that varies, for a table and a plot."""
    return {"request_rate": "requests/s sent", "max_concurrency": "at once"}[by]


def curves(by: str, results: Sequence[dict[str, Any]], names: dict[str, str]) -> list[Curve]:
    """A curve for each field of `names`, without the loads that lack it; an infinite rate has no place on an axis."""
    finite = [result for result in results if result[by] != "inf"]
    return [
        Curve(name, [(float(result[by]), result[key]) for result in finite if result[key] is not None])
        for name, key in names.items()
    ]


def cell_text(value: Any) -> str:
    """A figure or a word in the table."""
    return value if isinstance(value, str) else number(value)
