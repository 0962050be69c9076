"""The sentences of a plan, as `planner.plan_json.plan_json` tells it: the same on a terminal and on a page."""

from __future__ import annotations

from weft.cli.plan_columns import MARK, Told, between
from weft.cli.plan_picture import LINKS
from weft.formatting import format_bytes, format_counts

REJECTED = 4  # layouts of which the reason is told


def model_line(told: Told) -> str:
    """The model, how large it is, and in what."""
    model = told["model"]
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in model["weight_bytes_by_precision"].items())
    return f"{model['name']}: {model['params'] / 1e9:,.2f} billion parameters, {sizes}"


def hardware_line(told: Told) -> str:
    """The GPUs by type, what joins them, and the engine."""
    hardware = told["hardware"]
    nodes = hardware["nodes"]
    there = format_counts(name for node in nodes for name in node["gpus"])
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


def traffic(told: Told) -> list[str]:
    """What goes over each of the links."""
    links, kinds = told["best"]["links"], {spec["kind"] for spec in told["hardware"]["types"].values()}
    lines = []
    if links["tensor"]:
        who = "ranks" if "cpu" in kinds else "GPUs"
        lines.append(f"The {who} exchange partial results over {LINKS[links['tensor']]} twice per layer")
    cargo = {"pipeline": "activations from stage to stage", "experts": "tokens to their experts"}
    for kind, link in LINKS.items():
        carried = [what for use, what in cargo.items() if links[use] == kind]
        if carried:
            lines.append(f"{link[0].upper()}{link[1:]} carries {' and '.join(carried)}")
    return lines


def legend(told: Told) -> str:
    """How the table is to be read: the column that decided, and what the ranges are."""
    predicted = told["best"]["predicted"]
    return (
        f"{MARK.strip()} decided. Ranges: at least 8 of 10 measurements should lie within; +-"
        f"{100 * predicted['error_band']:.0f} % for {told['engine']}: {predicted['error_source']}"
    )


def speeds(told: Told) -> list[str]:
    """How fast the best one is at the concurrency that was asked for, and what tells of times under load."""
    work, best = told["workload"], told["best"]
    predicted = best["predicted"]
    running, asked = predicted["concurrency"], work["concurrency"]
    requests = "one request" if running < 1.5 else f"{running:,.0f} requests at once"
    each = "each " if running >= 1.5 else ""
    waiting = f"; the others of {asked:,} wait" if asked != "max" and round(running) < asked else ""
    guesses = " without guesses" if told["speculative_config"] else ""
    low_high = between(predicted["bands"]["output_tok_s"])
    for_each = token_rate(1 / predicted["tpot_s_at_concurrency"])
    lines = [
        f"Busy ({requests}, {each}{work['input_len']:,} tokens in and {work['output_len']:,} out{waiting}): every user "
        f"gets {for_each} tok/s, {token_rate(predicted['output_tok_s'])} tok/s in all ({low_high}){guesses}"
    ]
    if round(running) > best["max_concurrency"] and not work["max_model_len_given"]:
        lines.append(
            f"More run at once than the {int(best['max_concurrency']):,} that fit in full length, since answers that "
            "are being written are shorter"
        )
    if told["simulate"]:
        lines.append(f"TTFT, idle is the first token of a request that is alone; under load: {told['simulate']}")
    return lines


def token_rate(tok_s: float) -> str:
    """Tokens per second as a whole number; one significant digit below 1, which would round to 0."""
    return f"{tok_s:,.0f}" if tok_s >= 1 else f"{tok_s:.1g}"


def steps(told: Told) -> list[str]:
    """How many tokens of prompts our own engine reads at a time, and why; other engines have their defaults."""
    best = told["best"]
    if told["engine"] != "weft":
        return []
    because = best["max_num_batched_tokens_because"]
    return [f"Prompts are read up to {best['max_num_batched_tokens']:,} tokens at a time: {because}"]


def rejections(told: Told) -> list[str]:
    """Why each rejected layout cannot be: first those of a precision in which nothing fits, then those that lack
    least."""
    fits = {candidate["precision"] for candidate in told["candidates"]}
    nearest = sorted(told["rejected"], key=lambda it: (it["layout"]["precision"] in fits, it["short_bytes"]))
    return [f"{it['layout']['name']}: {it['reason']}" for it in nearest]


def binds(told: Told) -> str:
    """What holds the plan back; empty where a rejection says so already."""
    text = str(told["binding"]["text"])
    return "" if text in rejections(told) else text
