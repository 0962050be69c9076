"""weft bench compare OLD NEW: ratios of two saved results."""

from __future__ import annotations

import json
from typing import Any

from weft.cli.bench.view import aligned, number
from weft.cli.flags.bench_flags import CompareArguments
from weft.cli.parser import UsageError
from weft.errors import ConfigError
from weft.study.bench.compare import FigureChange, changed_settings, figure_changes, read_result


def main(arguments: CompareArguments) -> int:
    """Print the table; return 1 if a figure is worse by more than the tolerance."""
    if len(arguments.argument) != 2:
        raise UsageError(
            "weft bench compare takes two files: the old result, then the new one", code="needs-two-results"
        )
    first, second = arguments.argument
    old, new = read_result(first), read_result(second)
    compared = figure_changes(old, new)
    if not compared:
        raise ConfigError(f"{first} and {second} have no figure in common", code="no-common-figure")
    worse = [change for change in compared if change.worse(arguments.tolerance)]
    different = changed_settings(old, new)
    if arguments.json:
        figures = [figure_json(change, change in worse) for change in compared]
        print(json.dumps({"tolerance": arguments.tolerance, "settings": different, "figures": figures}))
    else:
        for line in different:
            print(f"not the same work: {line}")
        rows = [table_row(change, change in worse) for change in compared]
        print("\n".join(aligned(["figure", "old", "new", "ratio", ""], rows)))
        print(f"\n{len(worse)} of {len(compared)} figures are worse by more than {100 * arguments.tolerance:g} %")
    return 1 if worse else 0


def figure_json(change: FigureChange, worse: bool) -> dict[str, Any]:
    """A figure of both results as JSON."""
    return {"name": change.name, "old": change.old, "new": change.new, "ratio": change.ratio, "worse": worse}


def table_row(change: FigureChange, worse: bool) -> list[str]:
    """A row of the table: a ratio above 1 is better."""
    ratio = "-" if change.ratio is None else f"{change.ratio:.3f}"
    return [change.name, number(change.old), number(change.new), ratio, "worse" if worse else ""]
