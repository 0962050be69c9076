"""`python -m weft.study.bench`: run the suite on this machine; print a Markdown table, and one JSON object on the
last line.

`weft bench compare` compares two such results.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from weft._version import __version__
from weft.checkpoint.hub import demo
from weft.errors import WeftError
from weft.machine.hardware import host
from weft.study.bench import suite

ALL = ("python", "batches", "server")


def main(words: Sequence[str] | None = None) -> int:
    """Run the suite with these arguments; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m weft.study.bench", description="Measure Weft on this machine.")
    parser.add_argument("--model", default=demo.NAME, help="the model to measure (default: demo)")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each batch (default: 5)")
    parser.add_argument("--starts", type=int, default=3, help="starts of weft serve (default: 3)")
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL, help="run these parts only")
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="write the JSON object to this file too")
    arguments = parser.parse_args(words)
    if arguments.runs < 1 or arguments.starts < 1:
        parser.error("--runs and --starts must be 1 or more")
    machine = host.probe_host()
    device = machine.gpus[0].name if machine.gpus else f"{len(machine.cores)} CPU cores"
    try:
        tasks = measure_parts(arguments.model, arguments.runs, arguments.starts, arguments.only)
    except WeftError as error:
        print(f"weft.study.bench: error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.model} on {device}; medians of {arguments.runs} runs.\n")
    print(markdown_table(suite.headline_rows(tasks)) + "\n")
    result = json.dumps({"task": "suite", "model": arguments.model, **result_header(device), **tasks})
    if arguments.save_result:
        arguments.save_result.write_text(result + "\n", encoding="utf-8")
    print(result)
    return 0


def measure_parts(model: str, runs: int, starts: int, parts: Sequence[str]) -> suite.Tasks:
    """Measure the given parts; the name of each is printed as it ends."""
    tasks: suite.Tasks = {}

    def report(name: str) -> None:
        print(f"  {name}", file=sys.stderr)

    if "python" in parts:
        tasks["python"] = suite.measure_python()
        report("python")
    if "batches" in parts or "server" in parts:
        measured, plan = suite.measure_batches(model, runs if "batches" in parts else 0, report)
        tasks |= measured
        if "server" in parts:
            tasks |= suite.measure_server(model, plan, starts)
            report("server")
    return tasks


def result_header(device: str) -> dict[str, Any]:
    """Date, device and versions of the measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "weft": __version__,
        "torch": version("torch"),
        "python_version": platform.python_version(),
    }


def markdown_table(rows: Sequence[Sequence[float | str | None]]) -> str:
    """A Markdown table; the ratio is measured over predicted."""

    def cell(value: float | str | None) -> str:
        if value is None:
            return ""
        return value if isinstance(value, str) else f"{value:,.2f}"

    lines = ["| | unit | measured | predicted | ratio | target |", "|---|---|---:|---:|---:|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
