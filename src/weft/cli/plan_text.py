"""The sentences of a plan, as `planner.answer.as_json` tells it: the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.cli.plan_picture import LINKS
from weft.planner.words import by_type, gigabytes

BEST = 3  # candidates in the table
REJECTED = 4  # layouts of which the reason is told

Told = Mapping[str, Any]


def model_line(told: Told) -> str:
    """The model, how large it is, and in what."""
    model = told["model"]
    sizes = ", ".join(f"{name} {gigabytes(size)}" for name, size in model["weight_bytes_by_precision"].items())
    return f"{model['name']}: {model['params'] / 1e9:,.2f} billion parameters, {sizes}"


def hardware_line(told: Told) -> str:
    """The GPUs by type, what joins them, and the engine."""
    hardware = told["hardware"]
    nodes = hardware["nodes"]
    there = by_type(name for node in nodes for name in node["gpus"])
    links = "/".join(dict.fromkeys(LINKS[node["link"]] for node in nodes if len(node["gpus"]) > 1))
    if len(nodes) > 1:
        inside = f"{links} inside, " if links else ""
        there += f" on {len(nodes):,} nodes ({inside}{hardware['network_Bps'] * 8 / 1e9:g} Gb/s between them)"
    elif links:
        there += f" ({links})"
    return f"{there}; engine {told['engine']}"


def remarks(told: Told) -> list[str]:
    """What the engine does not run yet, and what else a reader has to know."""
    missing = told["model"]["missing"] if told["engine"] == "weft" else []
    yet = [f"Weft plans this but does not run it yet: {it}" for it in missing]
    return [*yet, *(f"note: {note}" for note in told["notes"])]


def verdict(told: Told) -> str:
    """What is best, or that nothing fits."""
    best = told["best"]
    return f"best for {told['objective']}: {best['name']}" if best else "nothing fits"


def traffic(told: Told) -> str:
    """What goes over the links; empty where nothing does."""
    links = told["best"]["links"]
    uses = {"tensor": "the ranks of a stage sum", "pipeline": "stages hand on", "experts": "replicas reach experts"}
    over = {kind: [does for use, does in uses.items() if links[use] == kind] for kind in LINKS}
    return "; ".join(f"{' and '.join(does)} over {LINKS[kind]}" for kind, does in over.items() if does)


def speeds(told: Told) -> str:
    """How fast the best one is at the concurrency that was asked for."""
    work, predicted = told["workload"], told["best"]["predicted"]
    running = predicted["concurrency"]
    requests = "one request" if running < 1.5 else f"{running:,.0f} requests"
    asked = work["concurrency"]
    guesses = " without guesses" if told["speculative_config"] else ""
    waiting = f" (the others of {asked:,} wait)" if asked != "max" and round(running) < asked else ""
    return (
        f"with {requests} of {work['input_len']:,} + {work['output_len']:,} tokens at once{waiting}: "
        f"{1000 * predicted['tpot_s_at_concurrency']:.1f} ms per token of each, {predicted['output_tok_s']:,.0f} "
        f"tok/s{guesses}; predictions are within {100 * predicted['error_band']:.0f} %"
    )


def steps(told: Told) -> list[str]:
    """How many tokens a step of our own engine has, and why; other engines have their defaults."""
    best = told["best"]
    if told["engine"] != "weft":
        return []
    return [f"steps of up to {best['max_num_batched_tokens']:,} tokens: {best['max_num_batched_tokens_because']}"]


def rejections(told: Told) -> list[str]:
    """Why each rejected layout cannot be, those that lack least first."""
    nearest = sorted(told["rejected"], key=lambda it: it["short_bytes"])
    return [f"{it['layout']['name']}: {it['reason']}" for it in nearest]


def binds(told: Told) -> str:
    """What holds the plan back; empty where a rejection says so already."""
    text = str(told["binding"]["text"])
    return "" if text in rejections(told) else text


def tokens(count: int) -> str:
    """482,864, or 448.7 M"""
    return f"{count:,}" if count < 1e7 else f"{count / 1e6:,.1f} M"
