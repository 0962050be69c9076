"""The figures of one server as JSON, and of several servers together as `weft top` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.monitor.finding import Code, Finding
from weft.monitor.history import GpuMoment, History, RankShares

RECENT_S = 2.0  # figures are of at least this time, if the history has it

# Fields of the rows of `weft top --json`, in this order; a server's own answer has further ones.
GPU_FIELDS = (
    "index",
    "name",
    "utilization",
    "memory_utilization",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_w",
    "sm_clock_mhz",
    "temperature_c",
    "pcie_tx_Bps",
    "pcie_rx_Bps",
    "nvlink_tx_Bps",
    "nvlink_rx_Bps",
    "processes",
    "ranks",
)
MODEL_FIELDS = (
    "name",
    "running",
    "waiting",
    "kv_usage",
    "prefix_hit_rate",
    "ttft_s",
    "itl_s",
    "tok_s",
    "kv_used_bytes",
    "kv_size_bytes",
    "layout",
)
RANK_FIELDS = ("rank", "device", "layers", "compute", "communication", "waiting", "delayed")
FINDING_FIELDS = ("code", "text", "value", "remedy", "limit", "model", "ranks", "stage", "follows_from")


def describe_server(
    model: str,
    node: str,
    rank_nodes: Mapping[int, str],
    history: History,
    findings: Sequence[Finding],
    time_s: float,
) -> dict[str, Any]:
    """The figures of one server at `time_s` since 1970, over the end of its history. `node` is the server's host."""
    recent = history.recent(RECENT_S)
    ranks = describe_ranks(recent, rank_nodes)
    gpus = [
        describe_gpu(gpu, [row["rank"] for row in ranks if (row["node"], row["device"]) == (node, f"cuda:{index}")])
        for gpu in recent.last.gpus
        for index in [gpu.figures.index]
    ]
    return {
        "time": time_s,
        "nodes": [{"node": node, "gpus": gpus}],
        "models": [describe_model(model, recent)],
        "ranks": ranks,
        "diagnosis": [describe_finding(model, finding) for finding in findings],
    }


def describe_gpu(gpu: GpuMoment, ranks: Sequence[int]) -> dict[str, Any]:
    """One row of a node's GPUs."""
    figures = gpu.figures
    row = {name: getattr(figures, name, None) for name in GPU_FIELDS}
    row["processes"] = [{"pid": holder.pid, "name": holder.name, "used_bytes": holder.nbytes} for holder in gpu.holders]
    row["ranks"] = list(ranks)
    return row | {"power_limit_w": figures.power_limit_w, "throttle": list(figures.throttle)}


def without_processes(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a server with the bytes that processes hold on GPUs, but without their ids and names."""
    nodes = [
        node | {"gpus": [gpu | {"processes": [_nameless(row) for row in gpu["processes"]]} for gpu in node["gpus"]]}
        for node in figures["nodes"]
    ]
    return figures | {"nodes": nodes, "diagnosis": [_impersonal(row) for row in figures["diagnosis"]]}


def _nameless(process: Mapping[str, Any]) -> dict[str, Any]:
    return {**process, "pid": None, "name": None}


def _impersonal(finding: dict[str, Any]) -> dict[str, Any]:
    """A finding that names no process."""
    if finding["code"] != Code.FOREIGN_MEMORY:
        return finding
    return finding | {
        "text": f"other processes hold {finding['value']:.0%} of a GPU's memory",
        "remedy": "stop these processes, which the server's log and the admin key name, and start again",
    }


def describe_finding(model: str, finding: Finding) -> dict[str, Any]:
    """One row of the diagnosis of a server with this model."""
    return {name: model if name == "model" else getattr(finding, name) for name in FINDING_FIELDS}


def describe_model(name: str, history: History) -> dict[str, Any]:
    """Load, speed and layout of a model; rates and percentiles are of the history, None if it has nothing to tell."""
    total = history.last.total
    cache = cache_bytes(history)
    queries = history.counted("prefix_queries")
    ttft = history.last.ttft.since(history.first.ttft)
    itl = history.last.itl.since(history.first.itl)
    return {
        "name": name,
        "running": total.running,
        "waiting": total.waiting,
        "kv_usage": total.blocks_used / max(1, total.blocks_total),
        "prefix_hit_rate": history.counted("prefix_hits") / queries if queries else None,
        "ttft_s": {"p50": ttft.quantile(0.5), "p95": ttft.quantile(0.95)},
        "itl_s": {"p50": itl.quantile(0.5), "p95": itl.quantile(0.95)},
        "tok_s": history.counted("generation_tokens") / history.seconds if history.seconds else None,
        "kv_used_bytes": cache and cache[0],
        "kv_size_bytes": cache and cache[1],
        "layout": describe_layout(history),
    }


def cache_bytes(history: History) -> tuple[int, int] | None:
    """Bytes of the KV cache of all ranks that are in use, and all of its bytes; None before any engine has a cache."""
    used = size = 0
    for plan, stats in zip(history.plans, history.last.stats, strict=False):
        # A block is one of an attention group, of which each rank holds a part.
        block_bytes = sum(map(plan.block_bytes, plan.attention_groups[0]))
        used += stats.blocks_used * block_bytes
        size += stats.blocks_total * block_bytes
    return (used, size) if size else None


def describe_layout(history: History) -> dict[str, int]:
    """The sizes of the layout, as the flags of `weft serve` count them: replicas are data-parallel too."""
    plan = history.plans[0]
    return {**plan.parallelism.sizes, "data_parallel": len(history.plans) * plan.data_parallel}


def describe_ranks(history: History, nodes: Mapping[int, str]) -> list[dict[str, Any]]:
    """A row for each rank of all plans, with the parts of its steps as far as it has reported them."""
    shares = {(rank.counters.replica, rank.counters.local_rank): rank for rank in history.shares()}
    rows = []
    for replica, plan in enumerate(history.plans):
        first = history.first_rank(replica)
        for local, (place, device) in enumerate(zip(plan.places, plan.devices, strict=True)):
            known: RankShares | None = shares.get((replica, local))
            rows.append(
                {
                    "rank": first + local,
                    "device": device.name,
                    "layers": len(place.layers),
                    "compute": known and known.compute,
                    "communication": known and known.communication,
                    "waiting": known and known.waiting,
                    "delayed": known and known.delayed,
                    "first_layer": place.layers.start,
                    "stage": place.stage,
                    "replica": replica,
                    "node": nodes.get(first + local, ""),
                    "weight_bytes": history.weights[replica][local],
                    "kv_bytes": kv_bytes(history, replica, local),
                }
            )
    return rows


def kv_bytes(history: History, replica: int, rank: int) -> int:
    """Bytes of a rank's KV cache. The rank's blocks are its attention group's, the replica's are those of all
    groups."""
    stats, plan = history.last.stats, history.plans[replica]
    blocks = stats[replica].blocks_total // plan.data_parallel if replica < len(stats) else 0
    return blocks * plan.block_bytes(rank)


def join_figures(
    servers: Iterable[Mapping[str, Any]], local: Mapping[str, Any] | None, time_s: float
) -> dict[str, Any]:
    """The figures of several servers as one object with the fields of `weft top --json`.

    `local` is a node with this machine's GPUs; a server's row of the same GPU replaces it, with its ranks.
    """
    nodes: dict[str, dict[int, dict[str, Any]]] = {}
    if local is not None:
        nodes[local["node"]] = {gpu["index"]: dict(gpu) for gpu in local["gpus"]}
    models: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    diagnosis: list[dict[str, Any]] = []
    for server in servers:
        for node in server["nodes"]:
            known = nodes.setdefault(node["node"], {})
            for gpu in node["gpus"]:
                before = known.get(gpu["index"], {"ranks": []})
                known[gpu["index"]] = {**gpu, "ranks": sorted({*before["ranks"], *gpu["ranks"]})}
        models += server["models"]
        ranks += server["ranks"]
        diagnosis += server["diagnosis"]
    return {
        "time": time_s,
        "nodes": [
            {"node": node, "gpus": [only(gpus[index], GPU_FIELDS) for index in sorted(gpus)]}
            for node, gpus in nodes.items()
        ],
        "models": [only(model, MODEL_FIELDS) for model in models],
        "ranks": [only(rank, RANK_FIELDS) for rank in ranks],
        "diagnosis": [only(finding, FINDING_FIELDS) for finding in diagnosis],
    }


def only(row: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The named fields of a row; None for a field that an older server does not have."""
    return {name: row.get(name) for name in fields}
