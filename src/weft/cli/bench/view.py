"""Text output of weft bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.study.bench.summary import METRICS, load_warnings


def print_load(result: Mapping[str, Any], times: Sequence[str] = ()) -> None:
    """Print the result of one load, with the named `times`, or with all."""
    print("\n".join(load_lines(result, times)))


def load_lines(result: Mapping[str, Any], times: Sequence[str] = ()) -> list[str]:
    """The lines of the report: the load, counts and rates, times, and warnings."""
    requests, seconds = result["num_prompts"], result["duration"]
    lines = [load_line(result), ""]
    rows = [
        ("answered", f"{result['completed']} of {requests} in {seconds:.2f} s"),
        ("requests/s", number(result["request_throughput"])),
    ]
    if result["request_goodput"] is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in result["goodput_limits_ms"].items())
        share = f"{100 * result['goodput_share']:.0f} % within {limits}"
        rows.append(("goodput, requests/s", f"{number(result['request_goodput'])} ({share})"))
    cached = result["cached_input_tokens"]
    rows += [
        ("output tokens/s", number(result["output_throughput"])),
        ("all tokens/s", number(result["total_token_throughput"])),
        (
            "prompt tokens",
            f"{result['total_input_tokens']:,}" + (f" ({cached:,} from the prefix cache)" * bool(cached)),
        ),
        ("answer tokens", f"{result['total_output_tokens']:,}"),
        ("most at once", str(result["most_at_once"])),
    ]
    if result["failed"]:
        rows.append(("failed", str(result["failed"])))
        rows += [("", f"{count} x {error}") for error, count in result["errors"].items()]
    width = max(len(name) for name, _ in rows)
    lines += [f"{name:{width}}  {value}" for name, value in rows]
    lines += ["", *times_table(result, times), "", client_line(result)]
    lines += [f"warning: {text}" for text in load_warnings(result, requests)]
    return lines


def load_line(result: Mapping[str, Any]) -> str:
    """The load in one line."""
    rate, offered = result["request_rate"], result["offered_rate"]
    arrive = "all at once" if rate == "inf" else f"{rate:g} per second ({offered:.2f} drawn)"
    if rate != "inf" and result["burstiness"] != 1:
        arrive += f", burstiness {result['burstiness']:g}"
    limit = result["max_concurrency"]
    held = f", at most {limit} unfinished" if limit else ""
    return f"{result['model_id']} at {result['endpoint']}: {result['num_prompts']} requests, {arrive}{held}"


def times_table(result: Mapping[str, Any], times: Sequence[str] = ()) -> list[str]:
    """The table of the named `times`, or of all, in milliseconds."""
    columns = ["mean", "median", *(f"p{percent:g}" for percent in result["percentiles"])]
    rows = [
        [f"{name.upper()}, {what}", *(number(result[f"{column}_{name}_ms"]) for column in columns)]
        for name, what in METRICS.items()
        if not times or name in times
    ]
    return aligned(["ms", *columns], rows)


def client_line(result: Mapping[str, Any]) -> str:
    """The delays of the client itself, which show if it was fast enough."""
    held = f"; {result['held_back']} requests waited for --max-concurrency" if result["held_back"] else ""
    return (
        f"client: requests sent at most {result['client_max_late_ms']:.1f} ms late (p99 "
        f"{result['client_p99_late_ms']:.1f}), its event loop {result['client_p99_loop_late_ms']:.1f} ms (p99){held}"
    )


def number(value: float | None) -> str:
    """A figure with four significant digits, or three decimals below 1; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3f}"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in plain text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines
