"""The report: one table per model and precision, with ratios to Weft; the same as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from weft import __version__

OURS = ("weft", "weft int4", "weft q4_0", "weft q4_k_m")  # of which a table has one


@dataclass(frozen=True)
class Figure:
    """Result of one engine in one work: a value per round."""

    model: str
    bits: int
    work: str
    engine: str
    values: list[float]
    higher_is_better: bool

    @property
    def value(self) -> float:
        return median(self.values)


@dataclass(frozen=True)
class Row:
    """A work with everybody's figures. `ratio` is Weft's to the best peer's, above 1 where Weft is better."""

    figures: tuple[Figure, ...]

    @property
    def ours(self) -> Figure | None:
        return next((it for it in self.figures if it.engine in OURS), None)

    @property
    def best(self) -> Figure | None:
        peers = [it for it in self.figures if not it.engine.startswith("weft")]
        pick = max if self.figures[0].higher_is_better else min
        return pick(peers, key=lambda it: it.value) if peers else None

    @property
    def ratio(self) -> float | None:
        ours, best = self.ours, self.best
        if ours is None or best is None:
            return None
        return ours.value / best.value if ours.higher_is_better else best.value / ours.value


def rows(figures: Sequence[Figure]) -> dict[tuple[str, int], list[Row]]:
    """By model and precision, in the order in which they were measured."""
    tables: dict[tuple[str, int], dict[str, list[Figure]]] = {}
    for figure in figures:
        tables.setdefault((figure.model, figure.bits), {}).setdefault(figure.work, []).append(figure)
    return {key: [Row(tuple(found)) for found in works.values()] for key, works in tables.items()}


def markdown(figures: Sequence[Figure], left_out: dict[str, str]) -> str:
    lines = []
    for (model, bits), table in rows(figures).items():
        engines = list(dict.fromkeys(it.engine for row in table for it in row.figures))
        lines += [f"**{model}, {bits} bits**", "", f"| | {' | '.join(engines)} | Weft to the best |"]
        lines += [f"|---|{'---:|' * (len(engines) + 1)}"]
        for row in table:
            found = {it.engine: it for it in row.figures}
            cells = [shown(found[name].value) if name in found else "" for name in engines]
            ratio = "" if row.ratio is None or row.best is None else f"{row.ratio:.2f} ({row.best.engine})"
            lines.append(f"| {row.figures[0].work} | {' | '.join(cells)} | {ratio} |")
        lines.append("")
    lines += [f"Left out: {name}: {why}" for name, why in left_out.items()]
    return "\n".join(lines)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"


def write_report(folder: Path, figures: Sequence[Figure], left_out: dict[str, str], told: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown(figures, left_out)
    (folder / "peers.md").write_text(table + "\n")
    cores = len(os.sched_getaffinity(0))
    whole = {
        "weft": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor()}, {cores} cores",
        **told,
        "figures": [{**vars(it), "value": it.value} for it in figures],
        "ratios": [
            {"model": model, "bits": bits, "work": row.figures[0].work, "best": row.best.engine, "ratio": row.ratio}
            for (model, bits), table_rows in rows(figures).items()
            for row in table_rows
            if row.ratio is not None and row.best is not None
        ],
        "left_out": left_out,
    }
    (folder / "peers.json").write_text(json.dumps(whole, indent=1) + "\n")
    picture(folder / "peers.png", figures)
    print(table)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def picture(path: Path, figures: Sequence[Figure]) -> None:
    """A bar per engine and work, as a share of the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(key, row) for key, table in rows(figures).items() for row in table if row.ratio is not None]
    if not drawn:
        return
    figure, axes = pyplot.subplots(len(drawn), 1, figsize=(8, 1.1 * len(drawn) + 0.5), squeeze=False)
    for ((model, bits), row), axis in zip(drawn, axes[:, 0], strict=True):
        names = [it.engine for it in row.figures]
        colours = ["tab:orange" if name.startswith("weft") else "tab:gray" for name in names]
        bars = axis.barh(names, [it.value for it in row.figures], color=colours)
        axis.bar_label(bars, [shown(it.value) for it in row.figures], padding=2, fontsize=6)
        axis.set_title(f"{model}, {bits} bits, {row.figures[0].work}", fontsize=7, loc="left")
        axis.tick_params(labelsize=6)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
