"""The summary line of a plan, and the reasons for its choice of layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from weft.formatting import format_counts
from weft.planner.note import Note, create_note
from weft.planner.question import Question
from weft.planner.search.ranking import (
    Candidate,
    faster_alone,
    objective_value,
    preference,
    request_s,
    single_request_s,
)
from weft.planner.search.search import SearchResult, closest_miss


def summary_note(result: SearchResult, *, runs: bool) -> Note:
    """ "Yes: Qwen3-32B in 4 bits on both GPUs, about 51 tok/s for one user (31-72), 78,000 tokens of context".

    `runs` is false if our own engine lacks something for the model.
    """
    question, best = result.question, result.best
    name = question.model.rstrip("/").rpartition("/")[2]
    if best is None:
        return _no(result, name)
    speed, band = best.predicted.single_tok_s, best.predicted.error_band
    return create_note(
        "fits",
        runs=runs or question.engine != "weft",
        model=name,
        weights=bits(best.layout.precision),
        gpus=gpus_used(question, best),
        tok_s=speed,
        low=speed * (1 - band),
        high=speed * (1 + band),
        kv_tokens=best.memory.kv_tokens,
        replicas=best.cut.parallelism.data_parallel,
        shared=best.cut.parallelism.shares_experts,
    )


def _no(result: SearchResult, name: str) -> Note:
    miss, cluster = closest_miss(result.rejected), result.question.cluster
    weights = " or ".join(dict.fromkeys(bits(precision) for precision in result.question.precisions))
    gpus = format_counts(gpu.name for gpu in cluster.gpus)
    if miss is None or not miss.short_bytes:
        return create_note("no_layout", model=name, weights=weights, gpus=gpus)
    return create_note(
        "does_not_fit",
        model=name,
        weights=weights,
        gpus=gpus,
        short_bytes=miss.short_bytes,
        per_gpu=len(cluster.gpus) > 1 and not cluster.on_cpu,
    )


def bits(precision: str) -> str:
    """ "in 4 bits" for a precision that is named after its bits, else "as PRECISION"."""
    number = re.search(r"\d+", precision)
    return f"in {number[0]} bits" if number else f"as {precision}"


def gpus_used(question: Question, candidate: Candidate) -> str:
    """ "both GPUs", "1 of 2 GPUs"."""
    if question.cluster.on_cpu:
        return "the CPU"
    total = len(question.cluster.gpus)
    used = len(set(candidate.layout.gpus) - {total})
    with_cpu = "the CPU and " * (total in candidate.layout.gpus)
    return with_cpu + _gpus_of(question, used, total)


def _gpus_of(question: Question, used: int, total: int) -> str:
    if used < total:
        return f"{used} of {total} GPUs"
    return {1: f"1 {question.cluster.gpus[0].name}", 2: "both GPUs"}.get(used, f"all {used:,} GPUs")


def choice_reasons(result: SearchResult) -> list[Note]:
    """The reason to prefer the best candidate to one with a higher figure, and the layout that is faster for one user
    at a time; empty if the best candidate is first in both."""
    question, best = result.question, result.best
    if best is None:
        return []
    notes = []
    preferred = preference(question, result.candidates)
    if preferred:
        other = preferred.over
        values = {"best": str(best.cut), "other": str(other.cut), "figures": _figures(question, best, other)}
        if preferred.because == "single request":
            notes.append(create_note("faster_single_request", speeds=_alone(question, best, other), **values))
        else:
            notes.append(create_note("simpler", **values))
    notes += _attention_groups(question, best, result.candidates)
    quickest = faster_alone(question, result.candidates) if question.objective == "throughput" else None
    if quickest:
        speeds = _alone(question, quickest, best)
        notes.append(create_note("other_faster_alone", other=str(quickest.cut), speeds=speeds))
    return notes


def _attention_groups(question: Question, best: Candidate, candidates: Sequence[Candidate]) -> Iterator[Note]:
    """For latent attention, the best candidate next to the best of the other kind: attention groups, each with a cache
    of its own, or tensor parallelism alone, whose ranks all hold the same latents.

    Nothing if the figures do not say so: then another reason has decided, which `choice_reasons` tells."""
    grouped = best.cut.parallelism.shares_experts
    if not question.shape.has_latents or not (grouped or best.cut.parallelism.tensor_parallel > 1):
        return
    cuts = [(candidate, candidate.cut.parallelism) for candidate in candidates]
    others = [each for each, cut in cuts if cut.shares_experts != grouped and (cut.tensor_parallel > 1 or not grouped)]
    other = max(others, key=lambda candidate: objective_value(question, candidate), default=None)
    if other is None or objective_value(question, other) >= objective_value(question, best):
        return
    yield create_note(
        "attention_groups" if grouped else "no_attention_groups",
        best=str(best.cut),
        other=str(other.cut),
        figures=_figures(question, best, other),
        flags=other.cut.flags,
    )


def choice_reason(result: SearchResult) -> str:
    """The reasons of `choice_reasons` in one line."""
    return ". ".join(map(str, choice_reasons(result)))


def _figures(question: Question, one: Candidate, other: Candidate) -> str:
    """Two candidates compared by the objective."""
    if question.objective == "latency":
        seconds = [request_s(question, candidate.predicted) for candidate in (one, other)]
        return " vs ".join(f"{value:.1f}" for value in seconds) + " s per request"
    unit = "tok/s per GPU" if question.objective == "cost" else "tok/s"
    rates = [objective_value(question, candidate) for candidate in (one, other)]
    return f"{' vs '.join(f'{value:,.0f}' for value in rates)} {unit}"


def _alone(question: Question, one: Candidate, other: Candidate) -> str:
    """Two candidates compared by a request alone: its tokens per second, or its total time if the prompt makes the
    difference."""
    speeds = [candidate.predicted.single_tok_s for candidate in (one, other)]
    if speeds[0] > 1.01 * speeds[1]:
        return f"{speeds[0]:,.1f} vs {speeds[1]:,.1f} tok/s"
    seconds = [single_request_s(question, candidate.predicted) for candidate in (one, other)]
    return " vs ".join(f"{value:,.1f}" for value in seconds) + " s"
