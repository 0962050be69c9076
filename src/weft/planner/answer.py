"""An answer as JSON has it: counts are counts, sizes bytes, times seconds, speeds tokens per second."""

from __future__ import annotations

from collections import Counter
from typing import Any

from weft.architectures.kv import kv_bytes_per_token
from weft.architectures.model import Model
from weft.architectures.place import Place
from weft.architectures.shape import ModelShape
from weft.formats.precision import weight_bytes
from weft.formatting import weft_command
from weft.hardware.cluster import Cluster, Home, Node
from weft.hardware.links import nvlink, table
from weft.plan import speculation
from weft.planner import verdict
from weft.planner.advice import advice
from weft.planner.binding import binding
from weft.planner.cost import Prediction
from weft.planner.cuts import Cut
from weft.planner.deployment import Layout
from weft.planner.domains import devices
from weft.planner.footprint import RankMemory, ReplicaMemory
from weft.planner.notes import notes
from weft.planner.objections import not_run
from weft.planner.plan_file import FORMAT
from weft.planner.question import Question
from weft.planner.ranking import Candidate, request_s
from weft.planner.replica import slowest_link
from weft.planner.search import Answer, engine_profile

# Flags that weft simulate does not have: its load is its own.
ONLY_PLANNED = ("--concurrency", "--speculative-config")
# Times under load, which a simulation tells (cli/plan_promise.py); None without one.
SIMULATED = ("ttft_s_at_concurrency", "ttft_s_at_concurrency_p95", "tpot_s_at_concurrency_p95")


def as_json(answer: Answer, model: Model) -> dict[str, Any]:
    """The whole plan; `best` is None where nothing fits."""
    question, best = answer.question, answer.best
    held_back = binding(answer)
    return {
        "format": FORMAT,
        "summary": verdict.summary(
            answer, missing(question, best.layout.precision if best else question.precisions[0])
        ),
        "why": verdict.why(answer),
        "simulate": simulated(question, best),
        "model": model_json(question, model, best.layout.precision if best else question.precisions[0]),
        "hardware": hardware_json(question),
        "engine": question.engine,
        "objective": question.objective,
        "workload": {
            "input_len": question.workload.input_len,
            "output_len": question.workload.output_len,
            "concurrency": question.workload.concurrency or "max",
            "max_model_len": question.workload.longest,
            "max_model_len_given": question.workload.max_model_len is not None,
        },
        "max_num_seqs": question.max_num_seqs,
        "speculative_config": speculation.write(question.speculation) if question.speculation else None,
        "promise": None,
        "best": best_json(question, best) if best else None,
        "candidates": [candidate_json(question, candidate) for candidate in answer.candidates],
        "rejected": [
            {"layout": cut_json(it.cut), "reason": it.reason, "short_bytes": it.short_bytes} for it in answer.rejected
        ],
        "binding": {"constraint": held_back.resource, "gains_when_doubled": held_back.gains, "text": held_back.text},
        "advice": advice(answer),
        "notes": [*([model.note] if model.note else []), *notes(question, best)],
        "provenance": provenance(question, model),
    }


def model_json(question: Question, model: Model, precision: str) -> dict[str, Any]:
    shape = question.shape
    lacks = missing(question, precision)
    return {
        "name": model.name,
        "architecture": shape.architecture,
        "runs": not lacks,
        "missing": lacks,
        "params": model.params,
        "precision": precision,
        "weight_bytes": weight_bytes(shape, precision),
        "weight_bytes_by_precision": {name: weight_bytes(shape, name) for name in question.precisions},
        "stored_bytes": model.stored_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(shape, question.kv_dtype or "bf16"),
        "source": model.source,
    }


def missing(question: Question, precision: str) -> list[str]:
    """What our own engine lacks for the model, and for its draft model."""
    lacks, how = not_run(question.shape, precision), question.speculation
    if how and how.draft:
        lacks += [f"as a draft model, {it}" for it in not_run(how.draft.shape, "bf16")]
    return lacks


def simulated(question: Question, best: Candidate | None) -> str | None:
    """The command that simulates the same deployment under load; None if nothing fits, nobody asked by flags, or a
    device map says where the stages lie."""
    if best is None or not question.flags or question.wish.devices or question.wish.spread:
        return None
    if len(question.precisions) == 1:
        return weft_command("simulate", question.flags, without=ONLY_PLANNED)
    chosen = ("--precision", best.layout.precision)
    return weft_command("simulate", question.flags, *chosen, without=(*ONLY_PLANNED, "--precision"))


def hardware_json(question: Question) -> dict[str, Any]:
    cluster = question.cluster
    return {
        "gpus": len(cluster.gpus),
        "nodes": [node_json(node) for node in cluster.nodes],
        "types": {
            gpu.name: {"kind": gpu.kind, "memory_bytes": gpu.memory_bytes, "bandwidth_Bps": gpu.bandwidth_Bps}
            for gpu in cluster.gpus
        },
        "network_Bps": cluster.network_Bps if len(cluster.nodes) > 1 else None,
        "memory_bytes": sum(gpu.memory_bytes for gpu in cluster.gpus),
        "dollars_per_gpu_hour": question.price,
    }


def node_json(node: Node) -> dict[str, Any]:
    """`link_Bps` is what the slowest of its GPUs sends to another, None where there is only one; `bridged` are the
    groups of them that NVLink joins where `link` is PCIe."""
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
        "tensor_parallel": cut.tensor_parallel,
        "pipeline_parallel": cut.pipeline_parallel,
        "data_parallel": cut.data_parallel,
        "expert_parallel": cut.expert_parallel,
        "precision": cut.precision,
    }


def candidate_json(question: Question, candidate: Candidate) -> dict[str, Any]:
    """One line of the table: no ranks."""
    layout, memory, predicted = candidate.layout, candidate.memory, candidate.predicted
    gpus = len(set(layout.gpus))
    fullest = memory.ranks[memory.fullest]
    return {
        **cut_json(candidate.cut),
        "kv_cache_dtype": layout.kv_dtype,
        "tensor_split": list(layout.tensor_weights),
        "pipeline_split": list(layout.stage_layers),
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
        "dollars_per_million_tokens": dollars(question, predicted.output_tok_s, gpus),
        "dollars_per_million_tokens_band": dollars_band(question, predicted, gpus),
    }


def links_json(cluster: Cluster, layout: Layout) -> dict[str, str | None]:
    """Over what the ranks of a stage sum, over what a stage hands on to the next, and over what replicas that share
    their experts exchange tokens: the slowest link that is used, None where there is nobody to send to."""
    tensor, homes = layout.tensor_parallel, [cluster.homes[index] for index in layout.gpus]
    starts = range(0, len(homes), tensor)
    groups: dict[str, set[frozenset[Home]]] = {"tensor": set(), "pipeline": set(), "experts": set()}
    if tensor > 1:
        groups["tensor"] = {frozenset(homes[start : start + tensor]) for start in starts}
    if layout.pipeline_parallel > 1:
        sending = (start for start in starts if not layout.places[start].last)
        groups["pipeline"] = {frozenset((homes[start], homes[start + tensor])) for start in sending}
    if layout.expert_parallel > tensor:
        groups["experts"] = {frozenset(homes)}
    found = {use: {slowest_link(group) for group in joined} for use, joined in groups.items()}
    slowest = ("network", "pcie", "memory", "nvlink")
    return {use: next((kind for kind in slowest if kind in kinds), None) for use, kinds in found.items()}


def best_json(question: Question, candidate: Candidate) -> dict[str, Any]:
    """A candidate with what each rank holds."""
    return {**candidate_json(question, candidate), "ranks": ranks_json(question, candidate)}


def ranks_json(question: Question, candidate: Candidate) -> list[dict[str, Any]]:
    """Every rank of every replica, in order."""
    layout, shape = candidate.layout, question.shape
    there = devices(question.cluster)
    found: list[dict[str, Any]] = []
    used: Counter[int] = Counter()  # of each GPU, by all of its ranks
    for rank, (place, index) in enumerate(zip(layout.places, layout.gpus, strict=True)):
        replica = candidate.memory.replicas[rank // layout.size]
        memory = replica.ranks[rank % layout.size]
        cache = cache_bytes(replica, memory)
        taken = 0 if used[index] else there[index].gpu.held_bytes  # by others
        used[index] += memory.weights.total + cache + memory.other_bytes
        found.append(
            {
                "rank": rank,
                "gpu": memory.gpu,
                "gpu_index": index,
                "node": there[index].node,
                "replica": rank // layout.size,
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
                "kv_bytes": cache,
                "kv_bytes_per_token": memory.kv_bytes_per_token,
                "other_bytes": memory.other_bytes,
                "held_bytes": taken,
                "usable_bytes": memory.usable_bytes,
                "memory_bytes": memory.memory_bytes,
            }
        )
    for row in found:
        index = row["gpu_index"]
        row["free_bytes"] = row["memory_bytes"] - used[index] - there[index].gpu.held_bytes
    return found


def cache_bytes(replica: ReplicaMemory, memory: RankMemory) -> int:
    """Of a rank's KV cache: as many tokens as the rank with the least room has; a window keeps fewer of them."""
    return min(max(0, memory.kv_room_bytes), replica.kv_tokens * memory.kv_bytes_per_token)


def ffn_columns(shape: ModelShape, place: Place) -> int:
    """Of the MLP; where every layer has experts, of each of those."""
    experts = shape.experts
    return len(place.expert_ffn) if experts and not experts.dense_layers else len(place.ffn)


def bands(predicted: Prediction) -> dict[str, list[float]]:
    """[low, high] of every predicted time and speed, by its name in the JSON: an interval in which at least 80 % of
    measurements should lie. Numbers of requests follow from the memory, which has no such error."""
    figures = {
        "single_tok_s": predicted.single_tok_s,
        "ttft_s": predicted.ttft_s,
        "tpot_s_at_concurrency": predicted.tpot_s,
        "output_tok_s": predicted.output_tok_s,
        "saturated_tok_s": predicted.saturated_tok_s,
    }
    band = predicted.error_band
    return {name: [value * (1 - band), value * (1 + band)] for name, value in figures.items()}


def dollars(question: Question, tok_s: float, gpus: int) -> float | None:
    """Rent of `gpus` GPUs for a million answer tokens, always busy; None without a price."""
    return None if question.price is None else question.price * gpus / 3600 / tok_s * 1e6


def dollars_band(question: Question, predicted: Prediction, gpus: int) -> list[float | None] | None:
    """[low, high] of the price, at the high and the low end of the throughput's band; None without a price."""
    if question.price is None:
        return None
    low, high = bands(predicted)["output_tok_s"]
    return [dollars(question, tok_s, gpus) for tok_s in (high, low)]


def provenance(question: Question, model: Model) -> dict[str, Any]:
    """Where the figures are from: the model's, each GPU's, the links', and every constant of the engine."""
    joined = [node for node in question.cluster.nodes if len(node.gpus) > 1]
    links = {"nvlink": {nvlink(gpu).source for node in joined if node.link == "nvlink" for gpu in node.gpus}}
    links["pcie"] = {table().pcie.source for node in joined if node.link == "pcie"}
    links["memory"] = {table().memory.source for node in joined if node.link == "memory"}
    links["network"] = {table().network.source} if len(question.cluster.nodes) > 1 else set()
    return {
        "model": model.source,
        "gpus": {gpu.name: gpu.source for gpu in question.cluster.gpus},
        "links": {kind: "; ".join(sorted(sources)) for kind, sources in links.items() if sources},
        "engine": engine_profile(question).provenance(),
    }
