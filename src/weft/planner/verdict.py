"""Verdict: the answer in a line, and why a candidate with a higher figure is not the best."""

from __future__ import annotations

import re

from weft.formatting import format_bytes, format_counts
from weft.planner.question import Question
from weft.planner.ranking import Candidate, alone_s, preference, quicker, request_s, worth
from weft.planner.search import Answer, closest


def summary(answer: Answer, missing: list[str]) -> str:
    """ "Yes: Qwen3-32B in 4 bits on both GPUs, about 51 tok/s for one user (31-72), 78,000 tokens of context";
    `missing` is what our own engine lacks for it."""
    question, best = answer.question, answer.best
    name = question.model.rstrip("/").rpartition("/")[2]
    if best is None:
        return _no(answer, name)
    low, high = (best.predicted.single_tok_s * (1 + way * best.predicted.error_band) for way in (-1, 1))
    yes = "It fits, but Weft does not run it yet" if missing and question.engine == "weft" else "Yes"
    copies = f" over {best.cut.data_parallel} replicas" if best.cut.data_parallel > 1 else ""
    return (
        f"{yes}: {name} {bits(best.layout.precision)} on {gpus_used(question, best)}, about "
        f"{best.predicted.single_tok_s:,.0f} tok/s for one user ({low:,.0f}-{high:,.0f}), "
        f"{best.memory.kv_tokens:,} tokens of context{copies}"
    )


def _no(answer: Answer, name: str) -> str:
    lacking, cluster = closest(answer.rejected), answer.question.cluster
    in_bits = " or ".join(dict.fromkeys(bits(precision) for precision in answer.question.precisions))
    there = format_counts(gpu.name for gpu in cluster.gpus)
    if lacking is None or not lacking.short_bytes:
        return f"No: {name} {in_bits} cannot be laid out on {there} as asked"
    each = " on one GPU" if len(cluster.gpus) > 1 and not cluster.on_cpu else ""
    more = f"{format_bytes(lacking.short_bytes)} more{each}"
    return f"No: {name} {in_bits} does not fit on {there}: even the best layout needs {more}"


def bits(precision: str) -> str:
    """ "in 4 bits", of a precision that is named after its bits."""
    found = re.search(r"\d+", precision)
    return f"in {found[0]} bits" if found else f"as {precision}"


def gpus_used(question: Question, candidate: Candidate) -> str:
    """ "both GPUs", "1 of 2 GPUs"."""
    there, used = len(question.cluster.gpus), len(set(candidate.layout.gpus))
    if question.cluster.on_cpu:
        return "the CPU"
    if used < there:
        return f"{used} of {there} GPUs"
    return {1: f"1 {question.cluster.gpus[0].name}", 2: "both GPUs"}.get(used, f"all {used:,} GPUs")


def why(answer: Answer) -> str:
    """Why the best one stands before one with a higher figure, and what is faster for one user at a time; empty if it
    is first in both."""
    question, best = answer.question, answer.best
    if best is None:
        return ""
    sentences = []
    if preferred := preference(question, answer.candidates):
        over, because = preferred.over, "simpler"
        if preferred.because == "single request":
            because = f"faster for a single request ({_alone(question, best, over)})"
        figures = _figures(question, best, over)
        sentences.append(f"{best.cut} is within the error of {over.cut} ({figures}) and {because}")
    if question.objective == "throughput" and (quickest := quicker(question, answer.candidates)):
        speeds = _alone(question, quickest, best)
        sentences.append(f"For one user at a time {quickest.cut} is faster ({speeds}): --objective latency")
    return ". ".join(sentences)


def _figures(question: Question, one: Candidate, other: Candidate) -> str:
    """Two candidates by what is asked for."""
    if question.objective == "latency":
        return " vs ".join(f"{request_s(question, it.predicted):.1f}" for it in (one, other)) + " s per request"
    unit = "tok/s per GPU" if question.objective == "cost" else "tok/s"
    return f"{' vs '.join(f'{worth(question, it):,.0f}' for it in (one, other))} {unit}"


def _alone(question: Question, one: Candidate, other: Candidate) -> str:
    """Two candidates by a request that is alone: its tokens, or all of its time if the prompt makes the difference."""
    speeds = [it.predicted.single_tok_s for it in (one, other)]
    if speeds[0] > 1.01 * speeds[1]:
        return f"{speeds[0]:,.1f} vs {speeds[1]:,.1f} tok/s"
    return " vs ".join(f"{alone_s(question, it.predicted):,.1f}" for it in (one, other)) + " s"
