"""A search result as JSON: counts are counts, sizes bytes, times seconds, speeds tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from weft.checkpoint.architectures.kv import kv_bytes_per_token
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import weight_bytes
from weft.formatting import weft_command
from weft.machine.hardware.cluster import Cluster, GpuPosition, Node
from weft.machine.hardware.links import link_table, nearest_nvlink
from weft.plan import speculation
from weft.plan.limits import limits_of
from weft.planner.deployment import DeploymentLayout
from weft.planner.memory.footprint import RankMemory, ReplicaMemory
from weft.planner.note import Note, create_note
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.report.advice import advice
from weft.planner.report.binding import binding_constraint
from weft.planner.report.notes import notes
from weft.planner.report.plan_file import FORMAT
from weft.planner.report.summary import choice_reason, choice_reasons, summary_note
from weft.planner.search.cuts import Cut
from weft.planner.search.domains import Device, cluster_devices
from weft.planner.search.objections import unsupported_reasons
from weft.planner.search.ranking import Candidate, request_s
from weft.planner.search.search import Rejected, SearchResult
from weft.planner.speed.cost import Prediction
from weft.planner.work.replica import slowest_link

# Flags that weft simulate does not have: its load has arrivals of its own.
ONLY_PLANNED = ("--concurrency", "--speculative-config", "--deterministic")
# Times under load, which only a simulation gives (cli/plan/promise.py); None without one.
SIMULATED = ("ttft_s_at_concurrency", "ttft_s_at_concurrency_p95", "tpot_s_at_concurrency_p95")


def plan_json(result: SearchResult, model: Model) -> dict[str, Any]:
    """The whole plan; `best` is None if nothing fits.

    Sentences have their codes next to them: `notes` in `note_codes`, and so on (planner.note).
    """
    question, best = result.question, result.best
    precision = best.layout.precision if best else question.precisions[0]
    binding = binding_constraint(result)
    summary = summary_note(result, runs=not missing_support(question, precision))
    changes = advice(result)
    remarks = [create_note("checkpoint", text=model.note)] if model.note else []
    remarks += notes(question, best)
    return {
        "format": FORMAT,
        "summary": str(summary),
        "summary_code": summary.code,
        "why": choice_reason(result),
        "why_codes": codes(choice_reasons(result)),
        "simulate": simulate_command(question, best),
        "model": model_json(question, model, precision),
        "hardware": hardware_json(question),
        "engine": question.engine,
        "objective": question.objective,
        "workload": workload_json(question),
        **limits_of(question),
        "speculative_config": speculation.to_speculative_config(question.speculation) if question.speculation else None,
        "promise": None,
        "best": best_json(question, best) if best else None,
        "candidates": [candidate_json(question, candidate) for candidate in result.candidates],
        "rejected": [rejected_json(rejected) for rejected in result.rejected],
        "binding": {
            "constraint": binding.resource,
            "gains_when_doubled": binding.gains,
            "text": binding.text,
            "code": binding.note.code,
        },
        "advice": sentences(changes),
        "advice_codes": codes(changes),
        "notes": sentences(remarks),
        "note_codes": codes(remarks),
        "provenance": provenance(question, model),
    }


def sentences(notes: Iterable[Note]) -> list[str]:
    return [str(note) for note in notes]


def codes(notes: Iterable[Note]) -> list[str]:
    return [note.code for note in notes]


def workload_json(question: Question) -> dict[str, Any]:
    workload = question.workload
    return {
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "concurrency": workload.concurrency or "max",
        "max_model_len": workload.longest,
        "max_model_len_given": workload.max_model_len is not None,
    }


def rejected_json(rejected: Rejected) -> dict[str, Any]:
    return {
        "layout": cut_json(rejected.cut),
        "reason": str(rejected.reason),
        "code": rejected.reason.code,
        "short_bytes": rejected.short_bytes,
    }


def model_json(question: Question, model: Model, precision: str) -> dict[str, Any]:
    shape = question.shape
    missing = missing_support(question, precision)
    return {
        "name": model.name,
        "architecture": shape.architecture,
        "runs": not missing,
        "missing": sentences(missing),
        "missing_codes": codes(missing),
        "params": model.params,
        "precision": precision,
        "weight_bytes": weight_bytes(shape, precision),
        "weight_bytes_by_precision": {name: weight_bytes(shape, name) for name in question.precisions},
        "stored_bytes": model.stored_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(shape, question.kv_dtype or "bf16"),
        "sums_per_layer": max(layer.sums for layer in shape.distinct_layers),
        "source": model.source,
    }


def missing_support(question: Question, precision: str) -> list[Note]:
    """Features that our own engine lacks for the model, and for its draft model."""
    reasons, speculative = unsupported_reasons(question.shape, precision), question.speculation
    if speculative and speculative.draft:
        reasons += unsupported_reasons(speculative.draft.shape, "bf16", draft=True)
    return reasons


def simulate_command(question: Question, best: Candidate | None) -> str | None:
    """The command that simulates the same deployment under load.

    None if nothing fits, if the question is not from a command line, or if a device map places the stages.
    """
    constraints = question.constraints
    if best is None or not question.flags or constraints.devices or constraints.device_map_strategy:
        return None
    if len(question.precisions) == 1:
        return weft_command("simulate", question.flags, without=ONLY_PLANNED)
    precision = ("--precision", best.layout.precision)
    return weft_command("simulate", question.flags, *precision, without=(*ONLY_PLANNED, "--precision"))


def hardware_json(question: Question) -> dict[str, Any]:
    cluster = question.cluster
    return {
        "gpus": len(cluster.gpus),
        "nodes": [node_json(node) for node in cluster.nodes],
        "types": {
            gpu.name: {"kind": gpu.kind, "memory_bytes": gpu.memory_bytes, "bandwidth_Bps": gpu.bandwidth_Bps}
            for gpu in cluster.devices
        },
        "network_Bps": cluster.network_Bps if len(cluster.nodes) > 1 else None,
        "memory_bytes": sum(gpu.memory_bytes for gpu in cluster.gpus),
        "dollars_per_gpu_hour": question.price,
    }


def node_json(node: Node) -> dict[str, Any]:
    """`link_Bps` is the rate at which the slowest GPU of the node sends to another one, None if it has only one GPU.
    `bridged` are the groups of its GPUs that NVLink joins if `link` is PCIe."""
    speeds = {"nvlink": "nvlink_Bps", "pcie": "pcie_Bps", "memory": "bandwidth_Bps"}
    return {
        "gpus": [gpu.name for gpu in node.gpus],
        "link": node.link,
        "link_Bps": min(getattr(gpu, speeds[node.link]) for gpu in node.gpus) if len(node.gpus) > 1 else None,
        "bridged": [list(group) for group in node.bridged],
    }


def cut_json(cut: Cut) -> dict[str, Any]:
    return {
        "name": str(cut),
        **cut.parallelism.sizes,
        "enable_expert_parallel": cut.parallelism.deals_experts,
        "precision": cut.precision,
    }


def candidate_json(question: Question, candidate: Candidate) -> dict[str, Any]:
    """One line of the table, without ranks."""
    layout, memory, predicted = candidate.layout, candidate.memory, candidate.predicted
    gpus = layout.gpu_count(question.cluster)
    fullest = memory.ranks[memory.fullest]
    return {
        **cut_json(candidate.cut),
        "kv_cache_dtype": layout.kv_dtype,
        "tensor_split": list(layout.parallelism.weights),
        "pipeline_split": list(layout.parallelism.pipeline_split),
        "links": links_json(question.cluster, layout),
        "fullest": {
            "rank": memory.fullest,
            "usable_bytes": fullest.usable_bytes,
            "memory_bytes": fullest.memory_bytes,
        },
        "kv_tokens": memory.kv_tokens,
        "max_num_batched_tokens": memory.replicas[0].batched_tokens,
        "max_num_batched_tokens_because": memory.replicas[0].batched_reason,
        "max_concurrency": round(memory.max_concurrency(question.workload.longest), 2),
        "longest_request": memory.longest,
        "predicted": {
            "single_tok_s": predicted.single_tok_s,
            "ttft_s": predicted.ttft_s,
            "tpot_s_at_concurrency": predicted.tpot_s,
            **dict.fromkeys(SIMULATED),
            "concurrency": predicted.concurrency,
            "output_tok_s": predicted.output_tok_s,
            "saturated_tok_s": predicted.saturated_tok_s,
            "saturated_concurrency": predicted.saturated_concurrency,
            "limited_by": predicted.limit,
            "error_band": predicted.error_band,
            "error_source": predicted.error_source,
            "request_s": request_s(question, predicted),
            "bands": bands(predicted),
        },
        "output_tok_s_per_gpu": predicted.output_tok_s / gpus,
        "dollars_per_million_tokens": dollars_per_million(question, predicted.output_tok_s, gpus),
        "dollars_per_million_tokens_band": dollars_band(question, predicted, gpus),
    }


def links_json(cluster: Cluster, layout: DeploymentLayout) -> dict[str, str | None]:
    """The slowest link in use, by purpose; None if nothing is sent.

    `tensor` is for the all-reduces of a stage's ranks, `pipeline` for the sends from one stage to the next, `experts`
    for the exchange of tokens between replicas that share their experts.
    """
    slowest_first = ("network", "pcie", "memory", "nvlink")
    links: dict[str, str | None] = {}
    for purpose, groups in _groups_by_purpose(cluster, layout).items():
        kinds = {slowest_link(group) for group in groups}
        links[purpose] = next((kind for kind in slowest_first if kind in kinds), None)
    return links


def _groups_by_purpose(cluster: Cluster, layout: DeploymentLayout) -> dict[str, set[frozenset[GpuPosition]]]:
    """The places of the GPUs that send to each other, by purpose."""
    tensor, gpu_positions = layout.parallelism.tensor_parallel, [cluster.gpu_positions[index] for index in layout.gpus]
    starts = range(0, len(gpu_positions), tensor)
    groups: dict[str, set[frozenset[GpuPosition]]] = {"tensor": set(), "pipeline": set(), "experts": set()}
    if tensor > 1:
        groups["tensor"] = {frozenset(gpu_positions[start : start + tensor]) for start in starts}
    if layout.parallelism.pipeline_parallel > 1:
        senders = [start for start in starts if not layout.places[start].last]
        groups["pipeline"] = {frozenset((gpu_positions[start], gpu_positions[start + tensor])) for start in senders}
    if layout.parallelism.shares_experts:
        groups["experts"] = {frozenset(gpu_positions)}
    return groups


def best_json(question: Question, candidate: Candidate) -> dict[str, Any]:
    """A candidate with the share of each rank."""
    return {**candidate_json(question, candidate), "ranks": ranks_json(question, candidate)}


def ranks_json(question: Question, candidate: Candidate) -> list[dict[str, Any]]:
    """Every rank of every replica, in order."""
    layout = candidate.layout
    devices = cluster_devices(question.cluster)
    first = {device.node: device.number for device in reversed(devices)}
    rows: list[dict[str, Any]] = []
    used: Counter[int] = Counter()  # bytes of each GPU, by all of its ranks
    for rank, index in enumerate(layout.gpus):
        replica, number = divmod(rank, layout.parallelism.replica_size)
        memory = candidate.memory.replicas[replica].ranks[number]
        row = _rank_json(question.shape, candidate, rank, devices[index])
        row["device"] = device_json(devices[index], first[devices[index].node])
        # The first rank of a GPU counts the bytes that other processes hold.
        row["held_bytes"] = 0 if used[index] else devices[index].gpu.held_bytes
        used[index] += memory.weights.total + row["kv_bytes"] + memory.other_bytes
        rows.append(row)
    for row in rows:
        index = row["gpu_index"]
        row["free_bytes"] = row["memory_bytes"] - used[index] - devices[index].gpu.held_bytes
    return rows


def _rank_json(shape: ModelShape, candidate: Candidate, rank: int, device: Device) -> dict[str, Any]:
    layout = candidate.layout
    number, position = divmod(rank, layout.parallelism.replica_size)
    place, replica = layout.places[rank], candidate.memory.replicas[number]
    memory = replica.ranks[position]
    return {
        "rank": rank,
        "gpu": memory.gpu,
        "gpu_index": device.number,
        "node": device.node,
        "replica": number,
        "stage": place.stage,
        "first_layer": place.layers.start,
        "layers": len(place.layers),
        "first_q_head": place.q_heads.start,
        "q_heads": len(place.q_heads),
        "first_kv_head": place.kv_heads.start,
        "kv_heads": len(place.kv_heads),
        "ffn": ffn_columns(shape, place),
        "first_expert": place.experts.start,
        "experts": len(place.experts),
        "weight_bytes": memory.weights.total,
        "kv_bytes": cache_bytes(replica, memory),
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "other_bytes": memory.other_bytes,
        "held_bytes": 0,
        "usable_bytes": memory.usable_bytes,
        "memory_bytes": memory.memory_bytes,
    }


def device_json(device: Device, first: int) -> dict[str, Any]:
    """A `plan.RankDevice`. `first` is the number of its node's first device in cluster order."""
    on_cpu = device.gpu.kind == "cpu"
    return {"node": device.node, "kind": "cpu" if on_cpu else "cuda", "index": 0 if on_cpu else device.number - first}


def cache_bytes(replica: ReplicaMemory, memory: RankMemory) -> int:
    """Bytes of a rank's KV cache: for as many tokens, or blocks, as the rank with the least room has."""
    if replica.kv.in_blocks:
        return replica.num_blocks * memory.kv_block_bytes
    return min(max(0, memory.kv_room_bytes), replica.kv_tokens * memory.kv_bytes_per_token)


def ffn_columns(shape: ModelShape, place: Place) -> int:
    """Columns of the MLP on a rank; if every layer has experts, columns of each expert."""
    return len(place.ffn) if shape.ffn else len(place.expert_ffn)


def bands(predicted: Prediction) -> dict[str, list[float]]:
    """[low, high] of every predicted time and speed, by its name in the JSON: an interval that should contain at least
    80 % of measurements. Numbers of requests follow from the memory, which has no such error."""
    figures = {
        "single_tok_s": predicted.single_tok_s,
        "ttft_s": predicted.ttft_s,
        "tpot_s_at_concurrency": predicted.tpot_s,
        "output_tok_s": predicted.output_tok_s,
        "saturated_tok_s": predicted.saturated_tok_s,
    }
    band = predicted.error_band
    return {name: [value * (1 - band), value * (1 + band)] for name, value in figures.items()}


def dollars_per_million(question: Question, tok_s: float, gpus: int) -> float | None:
    """Rent of `gpus` GPUs for a million answer tokens if they are always busy; None without a price."""
    return None if question.price is None else question.price * gpus / 3600 / tok_s * 1e6


def dollars_band(question: Question, predicted: Prediction, gpus: int) -> list[float | None] | None:
    """[low, high] of the price, at the high and the low end of the throughput's band; None without a price."""
    if question.price is None:
        return None
    low, high = bands(predicted)["output_tok_s"]
    return [dollars_per_million(question, tok_s, gpus) for tok_s in (high, low)]


def provenance(question: Question, model: Model) -> dict[str, Any]:
    """Sources of the figures: the model's, each GPU's, the links', and every constant's of the engine."""
    sources = _link_sources(question.cluster)
    return {
        "model": model.source,
        "gpus": {gpu.name: gpu.source for gpu in question.cluster.devices},
        "links": {kind: "; ".join(sorted(of_kind)) for kind, of_kind in sources.items() if of_kind},
        "engine": engine_profile(question).provenance(),
    }


def _link_sources(cluster: Cluster) -> dict[str, set[str]]:
    """Sources of the figures of each kind of link that the cluster has."""
    sources: dict[str, set[str]] = {"nvlink": set(), "pcie": set(), "memory": set(), "network": set()}
    for node in cluster.nodes:
        if len(node.gpus) == 1:
            continue
        if node.link == "nvlink":
            sources["nvlink"] |= {nearest_nvlink(gpu).source for gpu in node.gpus}
        else:
            row = link_table().pcie if node.link == "pcie" else link_table().memory
            sources[node.link].add(row.source)
    if len(cluster.nodes) > 1:
        sources["network"].add(link_table().network.source)
    return sources
