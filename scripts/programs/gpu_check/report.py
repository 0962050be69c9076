"""`scripts/gpu_check report`: the result files as tables of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.programs.gpu_check.card import ROOT
from scripts.programs.gpu_check.parts import PARTS
from scripts.programs.gpu_check.results import SUFFIX, Loaded, Row, load_results

PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- begin of scripts/gpu_check report -->", "<!-- end of scripts/gpu_check report -->"


def main(words: Sequence[str], folder: Path) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check report",
        description="Tables of the results in $RESULTS, as docs/benchmarks.md has them.",
    )
    parser.add_argument("--update", action="store_true", help="write them into docs/benchmarks.md")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    loaded = [content for name in PARTS if (content := load_results(folder / f"{name}{SUFFIX}")) is not None]
    measured = [content for content in loaded if not content.about["rehearsed"]]
    for content in loaded:
        if content.about["rehearsed"]:
            print(f"gpu_check: {content.about['part']} was rehearsed on a stand-in, and is left out", file=sys.stderr)
    if not measured:
        print(f"gpu_check: no measured results in {folder}; run scripts/gpu_check PART first", file=sys.stderr)
        return 2
    text = tables(measured)
    if not arguments.update:
        print(text)
        return 0
    page = arguments.page.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        print(f"gpu_check: {arguments.page} lacks the lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    arguments.page.write_text(replaced(page, text), encoding="utf-8")
    print(f"{len(measured)} parts are in {arguments.page}")
    return 0


def replaced(page: str, text: str) -> str:
    """`page` with `text` between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def tables(parts: Sequence[Loaded]) -> str:
    return "\n\n".join(part_table(part) for part in parts)


def part_table(part: Loaded) -> str:
    """Heading, conditions and rows of one part."""
    about = part.about
    conditions = (
        f"{about['date']}, commit {about['commit']}; {about['card']} (driver {about['driver']}, "
        f"torch {about['torch']}, Triton {about['triton']}, copies at {about['copy_GBps']:,.0f} GB/s); "
        f"`scripts/gpu_check {about['part']}`."
    )
    lines = [f"**{about['part']}: {PARTS[about['part']].what}**", "", conditions, ""]
    lines += ["| | value | unit | roofline | share | target | |", "|---|---:|---|---:|---:|---:|---|"]
    return "\n".join([*lines, *map(line, part.rows)])


def line(row: Row) -> str:
    """A row of the table; its share is of the roofline, without one of the target."""
    verdict = "" if row.ok is None else "ok" if row.ok else "FAILED" if row.target is None else "missed"
    cells = [
        row.name,
        figure(row.value),
        row.unit,
        figure(row.roofline),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        figure(row.target),
        "; ".join(word for word in (verdict, row.note) if word),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def figure(value: float | None) -> str:
    """Four digits or more, nothing for None."""
    if value is None:
        return ""
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
