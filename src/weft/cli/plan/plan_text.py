"""Sentences of a plan, from the JSON of `planner.report.plan_json`: the same on a terminal and on a page."""

from __future__ import annotations

from weft.cli.plan.columns import MARK, PlanJson, between
from weft.cli.plan.picture import LINKS
from weft.formatting import format_bytes, format_counts

REJECTED = 4  # rejected layouts that are listed
TIMES = {1: "once", 2: "twice"}


def model_line(plan: PlanJson) -> str:
    """The model, its parameters, and the size of its weights in each precision."""
    model = plan["model"]
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in model["weight_bytes_by_precision"].items())
    return f"{model['name']}: {model['params'] / 1e9:,.2f} billion parameters, {sizes}"


def hardware_line(plan: PlanJson) -> str:
    """The GPUs by type, their links, and the engine."""
    hardware = plan["hardware"]
    nodes = hardware["nodes"]
    gpus = format_counts(name for node in nodes for name in node["gpus"])
    links = "/".join(dict.fromkeys(LINKS[node["link"]] for node in nodes if len(node["gpus"]) > 1))
    if len(nodes) > 1:
        inside = f"{links} inside, " if links else ""
        gpus += f" on {len(nodes):,} nodes ({inside}{hardware['network_Bps'] * 8 / 1e9:g} Gb/s between them)"
    elif links:
        gpus += f" ({links})"
    return f"{gpus}; engine {plan['engine']}"


def remarks(plan: PlanJson) -> list[str]:
    """Features that the engine lacks for the model, and notes."""
    missing = plan["model"]["missing"] if plan["engine"] == "weft" else []
    lacking = [f"Weft plans this but does not run it yet: {feature}" for feature in missing]
    return [*lacking, *(f"note: {note}" for note in plan["notes"])]


def verdict(plan: PlanJson) -> str:
    """The best layout, or "nothing fits"."""
    best = plan["best"]
    return f"best for {plan['objective']}: {best['name']}" if best else "nothing fits"


def traffic(plan: PlanJson) -> list[str]:
    """A sentence for each kind of link and its traffic."""
    links, kinds = plan["best"]["links"], {spec["kind"] for spec in plan["hardware"]["types"].values()}
    lines = []
    if links["tensor"]:
        devices = "ranks" if "cpu" in kinds else "GPUs"
        times = TIMES[plan["model"]["sums_per_layer"]]
        lines.append(f"The {devices} exchange partial results over {LINKS[links['tensor']]} {times} per layer")
    cargo = {"pipeline": "activations from stage to stage", "experts": "tokens to their experts"}
    for kind, link in LINKS.items():
        carried = [load for use, load in cargo.items() if links[use] == kind]
        if carried:
            lines.append(f"{link[0].upper()}{link[1:]} carries {' and '.join(carried)}")
    return lines


def table_legend(plan: PlanJson) -> str:
    """An explanation of the table's mark and ranges."""
    predicted = plan["best"]["predicted"]
    return (
        f"{MARK.strip()} column that decided the choice. Ranges should hold 8 of 10 measurements. ±"
        f"{100 * predicted['error_band']:.0f} %: {predicted['error_source']}"
    )


def speeds(plan: PlanJson) -> list[str]:
    """Sentences on the best layout under load, the columns of the table that they explain, and times under load."""
    lines = [busy(plan)]
    work, best = plan["workload"], plan["best"]
    length = work["max_model_len"]
    if round(best["predicted"]["concurrency"]) > best["max_concurrency"] and not work["max_model_len_given"]:
        lines.append(
            f"These are more than the {int(best['max_concurrency']):,} requests of full length that fit: most answers "
            "are still shorter while they are written"
        )
    mean = work["input_len"] + work["output_len"]
    if length > mean:
        lines.append(f"{length:,} tokens is the longest request that must fit; the mean request has {mean:,}")
    if plan["simulate"]:
        lines.append(f"TTFT, idle is the first token of a request that is alone; under load: {plan['simulate']}")
    return lines


def busy(plan: PlanJson) -> str:
    """The speed of the best layout at the concurrency of the workload."""
    work, predicted = plan["workload"], plan["best"]["predicted"]
    running, concurrency = predicted["concurrency"], work["concurrency"]
    requests = "one request" if running < 1.5 else f"{running:,.0f} requests at once"
    each = "each " if running >= 1.5 else ""
    waiting = f"; the others of {concurrency:,} wait" if concurrency != "max" and round(running) < concurrency else ""
    low_high = between(predicted["bands"]["output_tok_s"])
    for_each = token_rate(1 / predicted["tpot_s_at_concurrency"])
    without = " without speculative decoding" if plan["speculative_config"] else ""
    return (
        f"Busy ({requests}, {each}{work['input_len']:,} tokens in and {work['output_len']:,} out{waiting}): every user "
        f"gets {for_each} tok/s, {token_rate(predicted['output_tok_s'])} tok/s in all ({low_high}){without}"
    )


def token_rate(tok_s: float) -> str:
    """Tokens per second as a whole number; one significant digit below 1, which would round to 0."""
    return f"{tok_s:,.0f}" if tok_s >= 1 else f"{tok_s:.1g}"


def steps(plan: PlanJson) -> list[str]:
    """The number of prompt tokens per step, and the reason; empty for other engines, which have their defaults."""
    best = plan["best"]
    if plan["engine"] != "weft":
        return []
    because = best["max_num_batched_tokens_because"]
    return [f"Prompts are read up to {best['max_num_batched_tokens']:,} tokens at a time: {because}"]


def rejections(plan: PlanJson) -> list[str]:
    """The reason for each rejected layout: first for the precisions in which nothing fits, then in the order of the
    memory that is lacking."""
    fits = {candidate["precision"] for candidate in plan["candidates"]}
    nearest = sorted(plan["rejected"], key=lambda row: (row["layout"]["precision"] in fits, row["short_bytes"]))
    return [f"{row['layout']['name']}: {row['reason']}" for row in nearest]


def bottleneck(plan: PlanJson) -> str:
    """The resource that limits the plan; empty if a rejection names it already."""
    text = str(plan["binding"]["text"])
    return "" if text in rejections(plan) else text
