"""weft bench sweep: one load after the other on the same server, each heavier than the one before."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from math import inf
from typing import Any

from weft.bench.summary import load_warnings
from weft.cli.bench_serve import Point, exit_status, measure, prepare, save, target
from weft.cli.bench_view import aligned, number
from weft.cli.parser import UsageError
from weft.cli.plot import Curve, Panel, check, picture, terminal

CURVES = {  # title of a plot, its unit, and its curves by name
    "times": ("ms", {"median TTFT": "median_ttft_ms", "p95 TTFT": "p95_ttft_ms", "p95 TPOT": "p95_tpot_ms"}),
    "output": ("tokens/s", {"output tokens/s": "output_throughput"}),
}


def main(arguments: Namespace) -> int:
    """Measure every point and print table and plots; status 1 if a point got no answer, 130 after Ctrl-C."""
    by, loads = points(arguments)
    if path := getattr(arguments, "plot", None):
        check(path)
    plan = prepare(arguments)
    results: list[dict[str, Any]] = []
    with target(arguments) as there:
        for at, point in enumerate(loads):
            found = measure(plan, there, point, at)
            results.append({"name": f"{axis(by)} {cell(found[by])}", **found})
            print(progress(by, found), file=sys.stderr)
            if found["interrupted"]:
                break
    model = results[0]["model_id"]
    whole = {"task": "sweep", "by": by, "model_id": model, "points": results}
    save(arguments, whole)
    if getattr(arguments, "json", False):
        print(json.dumps(whole))
    else:
        print("\n".join(report(by, results)))
    if path:
        unit, names = CURVES["times"]
        panel = Panel(curves(by, results, names), x=axis(by), y=unit)
        picture(path, [panel], title=f"{model}, {loads_in_words(results)}")
    return exit_status(results)


def points(arguments: Namespace) -> tuple[str, list[Point]]:
    """What is varied, and the loads. Raises UsageError unless it is one of the two."""
    said = vars(arguments)
    rates, limits = said.get("request_rate"), said.get("max_concurrency")
    if rates and limits and len(rates) > 1 and len(limits) > 1:
        raise UsageError("--request-rate and --max-concurrency both have several values; vary one of them")
    if not rates and not limits:
        raise UsageError("what is to be varied? Give --request-rate 1,2,4,8 or --max-concurrency 1,4,16")
    if rates and (len(rates) > 1 or not limits):
        limit = int(limits[0]) if limits else None
        return "request_rate", [Point(rate, arguments.burstiness, limit) for rate in rates]
    rate = rates[0] if rates else inf
    return "max_concurrency", [Point(rate, arguments.burstiness, int(limit)) for limit in limits or ()]


def progress(by: str, result: dict[str, Any]) -> str:
    """One point, as soon as it is there."""
    return (
        f"{axis(by)} {cell(result[by])}: {result['completed']} of {result['num_prompts']} answered, TTFT "
        f"{number(result['median_ttft_ms'])} ms, {number(result['output_throughput'])} tokens/s"
    )


def report(by: str, results: Sequence[dict[str, Any]]) -> list[str]:
    """The table, what is to be said about it, and the plots."""
    columns = {
        axis(by): by,
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
    rows = [[cell(result[key]) for key in columns.values()] for result in results]
    lines = [f"{results[0]['model_id']}: {loads_in_words(results)}", "", *aligned([*columns], rows)]
    for result in results:
        said = load_warnings(result, result["num_prompts"])
        lines += [f"warning: {axis(by)} {cell(result[by])}: {text}" for text in said]
    for unit, names in CURVES.values():
        lines += ["", *terminal(curves(by, results, names), x=axis(by), y=unit)]
    return lines


def loads_in_words(results: Sequence[dict[str, Any]]) -> str:
    """What is asked at each point."""
    first = results[0]
    whole = max(first["completed"], 1)
    return (
        f"{first['num_prompts']} requests each, about {first['total_input_tokens'] // whole:,} + "
        f"{first['total_output_tokens'] // whole:,} tokens"
    )


def axis(by: str) -> str:
    return {"request_rate": "requests/s sent", "max_concurrency": "at once"}[by]


def curves(by: str, results: Sequence[dict[str, Any]], names: dict[str, str]) -> list[Curve]:
    """A curve for each figure, of the points that have one; an infinite rate has no place on an axis."""
    return [
        Curve(name, [(float(it[by]), it[key]) for it in results if it[by] != "inf" and it[key] is not None])
        for name, key in names.items()
    ]


def cell(value: Any) -> str:
    return value if isinstance(value, str) else number(value)
