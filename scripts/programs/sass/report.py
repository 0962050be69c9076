"""Rows as a table for people, and beside the baseline, `tests/data/sass.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BASELINE = ROOT / "tests/data/sass.json"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- begin of scripts/sass -->", "<!-- end of scripts/sass -->"
PAGE_CARDS = ("A100-80GB-SXM", "H200-SXM", "RTX 4090")
GROWTH = 1.10  # of a share, beyond which it is worse than its baseline
UPDATE = "scripts/sass --update"

Row = dict[str, Any]


def loaded(path: Path = BASELINE) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def written(content: dict[str, Any]) -> str:
    """`content` as JSON with a line for each kernel."""
    lines = ",\n".join("  " + json.dumps(row) for row in content["kernels"])
    head = json.dumps({name: value for name, value in content.items() if name != "kernels"})
    return f'{head[:-1]}, "kernels": [\n{lines}\n]}}\n'


def name_of(row: Row) -> tuple[str, str, int]:
    return row["kernel"], row["variant"], row["architecture"]


def complaints(baseline: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    """Sentences on shares that are worse than the baseline. Baseline rows of architectures that were not measured, and
    measured shares that shrank, are no complaint.
    """
    known, seen = ({name_of(row): row for row in rows} for rows in (baseline, measured))
    architectures = {row["architecture"] for row in measured}
    lines = [f"{told(name)} is new: {UPDATE}" for name in seen if name not in known]
    lines += [f"{told(name)} is gone: {UPDATE}" for name in known if name not in seen and name[2] in architectures]
    for name in seen.keys() & known.keys():
        before, now = known[name]["shares"], seen[name]["shares"]
        lines += [
            f"{told(name)}: {now[card]:.3f} of the issue slots of {card}, {before[card]:.3f} before ({UPDATE})"
            for card in now
            if now[card] > GROWTH * before.get(card, 0.0)
        ]
    return sorted(lines)


def told(name: tuple[str, str, int]) -> str:
    kernel, variant, architecture = name
    return f"{kernel} ({variant}) for sm_{architecture}"


def share_table(rows: Iterable[Row]) -> Iterator[str]:
    """All rows in columns."""
    yield (
        f"{'kernel':17} {'variant':30} {'sm':>4} {'instr.':>7} {'warps':>5} {'regs':>5} {'shared':>7} {'per SM':>6} "
        f"{'work of a pass':>15}  share of issue slots"
    )
    for row in rows:
        work = f"{row['bytes_per_loop']:,.0f} B" if row["bytes_per_loop"] else f"{row['flops_per_loop']:,} FLOP"
        shares = ", ".join(f"{card} {share:.2f}" for card, share in row["shares"].items())
        yield (
            f"{row['kernel']:17} {row['variant']:30} {row['architecture']:4} {row['instructions']:7,} "
            f"{row['warps']:5} {row['registers']:5} {row['shared_bytes']:7,} {row['programs_per_sm']:6} {work:>15}  "
            f"{shares}"
        )


def page_table(content: dict[str, Any]) -> str:
    """The shares of PAGE_CARDS in Markdown."""
    shares: dict[tuple[str, str], dict[str, float]] = {}
    for row in content["kernels"]:
        shares.setdefault((row["kernel"], row["variant"]), {}).update(row["shares"])
    lines = [f"Triton {content['triton']}, {content['date']}:", ""]
    lines += [f"| kernel | variant | {' | '.join(PAGE_CARDS)} |", f"|---|---|{'---:|' * len(PAGE_CARDS)}"]
    for (kernel, variant), known in shares.items():
        cells = (f"{known[card]:.2f}" if card in known else "" for card in PAGE_CARDS)
        lines.append(f"| `{kernel}` | {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(page: str, text: str) -> str:
    """`page` with `text` between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def update(content: dict[str, Any]) -> None:
    """Make `content` the baseline, and its shares the page's."""
    BASELINE.write_text(written(content), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page_with(page, page_table(content)), encoding="utf-8")
