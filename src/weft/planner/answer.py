"""An answer as JSON has it: counts are counts, sizes bytes, times seconds, speeds tokens per second."""

from __future__ import annotations

from typing import Any

from weft.facts.kv import kv_bytes_per_token
from weft.facts.model import Model
from weft.facts.place import Place
from weft.facts.precision import weight_bytes
from weft.facts.shape import ModelShape
from weft.planner.advice import advice, binding
from weft.planner.cuts import Cut
from weft.planner.footprint import RankMemory, ReplicaMemory
from weft.planner.islands import devices
from weft.planner.notes import notes
from weft.planner.objections import not_run
from weft.planner.question import Question
from weft.planner.search import Answer, Candidate, output_tok_s


def as_json(answer: Answer, model: Model) -> dict[str, Any]:
    """The whole plan; `best` is None where nothing fits."""
    question, best = answer.question, answer.best
    held_back = binding(answer)
    return {
        "model": model_json(question, model, best.layout.precision if best else question.precisions[0]),
        "hardware": hardware_json(question),
        "engine": question.engine,
        "objective": question.objective,
        "workload": {
            "input_len": question.workload.input_len,
            "output_len": question.workload.output_len,
            "concurrency": question.workload.concurrency or "max",
            "max_model_len": question.workload.longest,
        },
        "best": best_json(question, best) if best else None,
        "candidates": [candidate_json(question, candidate) for candidate in answer.candidates],
        "rejected": [{"layout": cut_json(it.cut), "reason": it.reason} for it in answer.rejected],
        "binding": {"constraint": held_back.resource, "gains_when_doubled": held_back.gains, "text": held_back.text},
        "advice": advice(answer),
        "notes": [*([model.note] if model.note else []), *notes(question, best)],
    }


def model_json(question: Question, model: Model, precision: str) -> dict[str, Any]:
    shape = question.shape
    return {
        "name": model.name,
        "architecture": shape.architecture,
        "runs": not not_run(shape, precision),
        "params": model.params,
        "precision": precision,
        "weight_bytes": weight_bytes(shape, precision),
        "stored_bytes": model.stored_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(shape, question.kv_dtype or "bf16"),
        "source": model.source,
    }


def hardware_json(question: Question) -> dict[str, Any]:
    cluster = question.cluster
    return {
        "gpus": len(cluster.gpus),
        "nodes": [{"gpus": [gpu.name for gpu in node.gpus], "link": node.link} for node in cluster.nodes],
        "network_Bps": cluster.network_Bps if len(cluster.nodes) > 1 else None,
        "memory_bytes": sum(gpu.memory_bytes for gpu in cluster.gpus),
        "dollars_per_gpu_hour": question.price,
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
    return {
        **cut_json(candidate.cut),
        "kv_cache_dtype": layout.kv_dtype,
        "tensor_split": list(layout.tensor_weights),
        "pipeline_split": list(layout.stage_layers),
        "kv_tokens": memory.kv_tokens,
        "max_concurrency": round(memory.max_concurrency(question.workload.longest), 2),
        "longest_request": memory.longest,
        "predicted": {
            "single_tok_s": predicted.single_tok_s,
            "ttft_s": predicted.ttft_s,
            "tpot_s_at_concurrency": predicted.tpot_s,
            "concurrency": predicted.concurrency,
            "saturated_tok_s": predicted.saturated_tok_s,
            "saturated_concurrency": predicted.saturated_concurrency,
            "limited_by": predicted.limit,
            "error_band": predicted.error_band,
        },
        "dollars_per_million_tokens": dollars_per_million(question, candidate),
    }


def best_json(question: Question, candidate: Candidate) -> dict[str, Any]:
    """A candidate with what each rank holds."""
    return {**candidate_json(question, candidate), "ranks": ranks_json(question, candidate)}


def ranks_json(question: Question, candidate: Candidate) -> list[dict[str, Any]]:
    """Every rank of every replica, in order."""
    layout, shape = candidate.layout, question.shape
    there = devices(question.cluster)
    found = []
    for rank, (place, index) in enumerate(zip(layout.places, layout.gpus, strict=True)):
        replica = candidate.memory.replicas[rank // layout.size]
        memory = replica.ranks[rank % layout.size]
        cache = cache_bytes(replica, memory)
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
                "q_heads": len(place.q_heads),
                "kv_heads": len(place.kv_heads),
                "ffn": ffn_columns(shape, place),
                "experts": len(place.experts),
                "weight_bytes": memory.weights.total,
                "kv_bytes": cache,
                "kv_bytes_per_token": memory.kv_bytes_per_token,
                "other_bytes": memory.other_bytes,
                "free_bytes": memory.memory_bytes - memory.weights.total - cache - memory.other_bytes,
                "memory_bytes": memory.memory_bytes,
            }
        )
    return found


def cache_bytes(replica: ReplicaMemory, memory: RankMemory) -> int:
    """Of a rank's KV cache: as many tokens as the rank with the least room has; a window keeps fewer of them."""
    return min(max(0, memory.kv_room_bytes), replica.kv_tokens * memory.kv_bytes_per_token)


def ffn_columns(shape: ModelShape, place: Place) -> int:
    """Of the MLP; where every layer has experts, of each of those."""
    experts = shape.experts
    return len(place.expert_ffn) if experts and not experts.dense_layers else len(place.ffn)


def dollars_per_million(question: Question, candidate: Candidate) -> float | None:
    """Rent of the GPUs in use for a million answer tokens, always busy; None without a price."""
    if question.price is None:
        return None
    rent = question.price * len(set(candidate.layout.gpus)) / 3600
    return rent / output_tok_s(question, candidate.predicted) * 1e6
