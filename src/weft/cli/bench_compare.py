"""weft bench compare OLD NEW: what got better, what worse."""

from __future__ import annotations

import json
from argparse import Namespace

from weft.bench.compare import Change, changed_settings, figure_changes, read_result
from weft.cli.bench_view import aligned, number
from weft.cli.parser import UsageError
from weft.errors import ConfigError


def main(arguments: Namespace) -> int:
    """Print the table; 1 where a figure is worse by more than the tolerance."""
    if len(arguments.argument) != 2:
        raise UsageError("weft bench compare takes two files: the old result, then the new one")
    first, second = arguments.argument
    old, new = read_result(first), read_result(second)
    found = figure_changes(old, new)
    if not found:
        raise ConfigError(f"{first} and {second} have no figure in common")
    worse = [change for change in found if change.worse(arguments.tolerance)]
    unlike = changed_settings(old, new)
    if getattr(arguments, "json", False):
        figures = [
            {"name": it.name, "old": it.old, "new": it.new, "ratio": it.ratio, "worse": it in worse} for it in found
        ]
        print(json.dumps({"tolerance": arguments.tolerance, "settings": unlike, "figures": figures}))
    else:
        for line in unlike:
            print(f"not the same work: {line}")
        print("\n".join(aligned(["figure", "old", "new", "ratio", ""], [row(it, it in worse) for it in found])))
        print(f"\n{len(worse)} of {len(found)} figures are worse by more than {100 * arguments.tolerance:g} %")
    return 1 if worse else 0


def row(change: Change, worse: bool) -> list[str]:
    """A line of the table: a ratio above 1 is better."""
    ratio = "-" if change.ratio is None else f"{change.ratio:.3f}"
    return [change.name, number(change.old), number(change.new), ratio, "worse" if worse else ""]
