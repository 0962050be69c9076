"""`scripts/bench planner-accuracy`: the planner's speeds beside published ones, as docs/planner-accuracy.md and .png.

Fits again with every GPU and every model left out in turn, which takes a few minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec
from matplotlib import pyplot

from scripts.programs.bench.planner_accuracy.calibrate import EXPECTED, expected, fit, profiles
from tests.pure.measured import LIMITS, Case, cases, layouts_compared, ranking_error
from weft.machine.hardware import kernel_shares, links
from weft.machine.hardware.cluster import Cluster, Node
from weft.planner.profiles import engine_names, load_profile
from weft.planner.search.ranking import RANKING_ERROR

ROOT = Path(__file__).parents[4]
PAGE, PLOT = ROOT / "docs/planner-accuracy.md", ROOT / "docs/planner-accuracy.png"
UNITS = {"single": "tokens/s, one request", "load": "ms per token under load", "peak": "tokens/s, saturated"}
WORST = 10


def main() -> None:
    arguments = argparse.ArgumentParser(prog="scripts/bench planner-accuracy", description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="errors and plot only, to the terminal and the PNG")
    arguments.add_argument("--fit", action="store_true", help="print the constants that the fit finds, and end")
    given = arguments.parse_args()
    rows = cases()
    if given.fit:
        for (engine, name), value in fit(rows).items():
            print(f"{engine or 'common':14} {name:28} {value:8.4g}   expected {EXPECTED[engine, name][0]:g}")
        return
    pyplot.switch_backend("Agg")
    plot(rows)
    if given.quick:
        print("\n".join(by_kind(rows)))
        return
    PAGE.write_text("\n".join(page(rows)) + "\n")


def page(rows: Sequence[Case]) -> Iterator[str]:
    yield (ROOT / "scripts/programs/bench/planner_accuracy/opening.md").read_text().strip()
    yield ""
    yield from by_kind(rows)
    yield "\n![Predicted against measured](planner-accuracy.png)\n"
    yield "By engine:\n"
    yield from by_engine(rows)
    yield "\n## Comparison of layouts\n"
    yield from by_layout(rows)
    yield "\n## Errors for rows outside of the fit\n"
    yield (
        "Cross-validation: the constants are fitted again without the rows of one GPU or of one model, and then "
        "predict these rows. Each fit starts from round figures that are the same for every engine "
        "(`scripts/programs/bench/planner_accuracy/calibrate.py`). A GPU that is left out is known by its data sheet "
        "and its compute capability only. The H20 reaches a third of its bandwidth, which only its own rows show, so "
        "the table also has the errors without the H20. Three choices were made with all rows in view: the form of "
        "the formulas, the share of PCIe that sums reach, and the same streaming speed for FP8 weights as for 16-bit "
        "weights.\n"
    )
    yield from held_out(rows)
    yield f"\n## The {WORST} worst rows\n"
    yield "| kind | row | measured | predicted | error |\n|---|---|--:|--:|--:|"
    for row in sorted(rows, key=lambda row: -abs(row.error()))[:WORST]:
        yield (
            f"| {row.kind} | {row.engine}: {row.label} | {row.value:,.4g} | {row.predicted():,.4g} "
            f"| {row.error():+.0%} |"
        )
    yield from provenance()


def by_kind(rows: Sequence[Case]) -> Iterator[str]:
    yield "| kind | rows | mean absolute error | median | worst | limit |\n|---|--:|--:|--:|--:|--:|"
    for kind, limit in LIMITS.items():
        errors = [abs(row.error()) for row in rows if row.kind == kind]
        yield (
            f"| {kind} | {len(errors)} | **{fmean(errors):.1%}** | {median(errors):.1%} | {max(errors):.0%} "
            f"| {limit:.0%} |"
        )


def by_engine(rows: Sequence[Case]) -> Iterator[str]:
    yield "| engine | rows | mean absolute error | 90 % are within |\n|---|--:|--:|--:|"
    for engine in engine_names():
        errors = sorted(abs(row.error()) for row in rows if row.engine == engine)
        if errors:
            yield f"| {engine} | {len(errors)} | {fmean(errors):.1%} | {errors[int(0.9 * (len(errors) - 1))]:.0%} |"


def by_layout(rows: Sequence[Case]) -> Iterator[str]:
    pairs = sorted(layouts_compared(rows), key=ranking_error)
    errors = [ranking_error(pair) for pair in pairs]
    inside = sum(error <= RANKING_ERROR for error in errors)
    yield (
        "`weft plan` ranks layouts by ratios of predictions. Layouts of one model on one machine share the constants "
        "of the engine and the GPU, so both predictions have the errors of these constants. "
        f"{len(pairs)} pairs of rows differ only in the layout and the number of GPUs. The error of the ratio between "
        f"the two is {median(errors):.1%} in the median, and {inside} of {len(pairs)} pairs are within "
        f"{RANKING_ERROR:.0%}. Layouts within {RANKING_ERROR:.0%} of the highest figure are therefore a tie "
        "(`planner/search/ranking.py`): the planner takes the one with the faster single request, then the simpler "
        "one. "
        "The worst pairs:\n"
    )
    yield "| kind | row | other row | error of their ratio |\n|---|---|---|--:|"
    for pair in reversed(pairs[-3:]):
        one, other = pair
        yield f"| {one.kind} | {one.engine}: {one.label} | {other.label} | {ranking_error(pair):.0%} |"


def held_out(rows: Sequence[Case]) -> Iterator[str]:
    yield "| left out in turn | single | load | peak |\n|---|--:|--:|--:|"
    before = profiles(expected())
    yield _errors("all: nothing fitted, only the round figures", [(row, row.error(before)) for row in rows])
    keys: dict[str, Callable[[Case], str]] = {
        "a GPU": lambda row: row.cluster.gpus[0].name,
        "a model": lambda row: row.model,
    }
    for left_out, key in keys.items():
        found = []
        for name in sorted({key(row) for row in rows}):
            constants = profiles(fit([row for row in rows if key(row) != name], rounds=6))
            out = [row for row in rows if key(row) == name]
            found += [(row, (unseen(row) if left_out == "a GPU" else row).error(constants)) for row in out]
            print(f"without {name}: {fmean(abs(error) for _, error in found[-len(out) :]):.1%}", file=sys.stderr)
        yield _errors(left_out, found)
        if left_out == "a GPU":
            yield _errors("a GPU, without the H20", [pair for pair in found if pair[0].gpu != "H20-96GB"])


def unseen(row: Case) -> Case:
    """The same row on a GPU whose name is in no table."""
    nodes = tuple(
        Node(tuple(msgspec.structs.replace(gpu, name="new " + gpu.name) for gpu in node.gpus), node.link)
        for node in row.cluster.nodes
    )
    return msgspec.structs.replace(row, cluster=Cluster(nodes, row.cluster.network_Bps))


def _errors(left_out: str, found: Sequence[tuple[Case, float]]) -> str:
    means = [fmean(abs(error) for row, error in found if row.kind == kind) for kind in LIMITS]
    return f"| {left_out} | " + " | ".join(f"{mean:.1%}" for mean in means) + " |"


def provenance() -> Iterator[str]:
    yield "\n## Constants\n"
    yield "Common constants, for engines without one of their own:\n"
    shared: Mapping[str, str] = load_profile(engine_names()[0]).provenance()
    for engine in engine_names():
        shared = {name: text for name, text in shared.items() if load_profile(engine).provenance().get(name) == text}
    yield from (f"- `{name}` {text}" for name, text in shared.items())
    for engine in engine_names():
        yield f"\n{engine}:\n"
        yield from (
            f"- `{name}` {text}" for name, text in load_profile(engine).provenance().items() if name not in shared
        )
    yield "\n## Kernels\n"
    yield "| GPU | weights | per kernel | products | decode attention | prefill attention | source |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for entry in kernel_shares.kernel_share_entries():
        name = entry.gpu or ("any CPU" if entry.cpu else "any other")
        yield (
            f"| {name} | {entry.weights:.0%} | {entry.kernel_us:g} us | {entry.matmul:.0%} "
            f"| {entry.decode_attention:.0%} | {entry.prefill_attention:.0%} | {entry.source} |"
        )
    yield "\n## Links\n"
    for link in links.link_table().nvlink:
        yield f"- NVLink of capability {'.'.join(map(str, link.capability))}: {link.source}"
    yield f"- PCIe: {links.link_table().pcie.source}"
    yield f"- network: {links.link_table().network.source}"


def plot(rows: Sequence[Case]) -> None:
    figure, panels = pyplot.subplots(1, len(LIMITS), figsize=(15, 5))
    for panel, kind in zip(panels, LIMITS, strict=True):
        some = [row for row in rows if row.kind == kind]
        for engine in engine_names():
            points = [(row.value, row.predicted()) for row in some if row.engine == engine]
            if points:
                panel.scatter(*zip(*points, strict=True), s=22, label=engine, alpha=0.8)
        ends = [0.7 * min(row.value for row in some), 1.4 * max(row.value for row in some)]
        panel.plot(ends, ends, color="black", linewidth=0.8)
        panel.fill_between(
            ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color="black", alpha=0.08, label="15 %"
        )
        panel.set(xscale="log", yscale="log", title=UNITS[kind], xlabel="measured", ylabel="predicted")
        panel.set(xlim=ends, ylim=ends)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=90)


if __name__ == "__main__":
    main()
