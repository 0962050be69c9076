"""Ranking: which candidate is best, and which of the others it is preferred to although their figure is higher.

Two layouts of one model on one machine share the constants of the engine and of the GPUs, so most of the error of one
prediction is in the other too. The rest, RANKING_ERROR, is from pairs of published measurements that differ in the
layout only (docs/planner-accuracy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.planner.cost import Prediction
from weft.planner.cuts import Cut
from weft.planner.deployment import DeploymentLayout
from weft.planner.footprint import Footprint
from weft.planner.question import Question

# Relative; 17 of 20 pairs are within it. Source: tests/pure/test_accuracy.py, and the report that it is printed in.
RANKING_ERROR = 0.1


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that fits, with what it holds and how fast it will be."""

    cut: Cut
    layout: DeploymentLayout
    memory: Footprint
    predicted: Prediction


class Preference(msgspec.Struct, frozen=True):
    """The candidate with the highest figure, `over` which the best one is preferred, and what made the difference."""

    over: Candidate
    because: Literal["single request", "simpler"]


def objective_value(question: Question, candidate: Candidate) -> float:
    """What is asked for: requests per second of one at a time for latency, tokens per second of the whole deployment
    for throughput, those of each of its GPUs for cost."""
    if question.objective == "latency":
        return 1 / request_s(question, candidate.predicted)
    rate = candidate.predicted.output_tok_s
    return rate / len(set(candidate.layout.gpus)) if question.objective == "cost" else rate


def request_s(question: Question, predicted: Prediction) -> float:
    """Seconds of a request by itself, or at the concurrency that was asked for; where fewer fit at once the others
    wait, and all take longer by as much (Little's law)."""
    asked = question.workload.concurrency
    if asked is None:
        return single_request_s(question, predicted)
    crowded = predicted.ttft_s + question.workload.output_len * predicted.tpot_s
    return crowded * max(1.0, asked / predicted.concurrency)


def single_request_s(question: Question, predicted: Prediction) -> float:
    """Seconds of a request by itself."""
    return predicted.ttft_s + question.workload.output_len / predicted.single_tok_s


def simplicity(layout: DeploymentLayout) -> tuple[int, ...]:
    """Less is simpler."""
    return layout.replica_size, layout.pipeline_parallel, layout.expert_parallel, len(layout.gpus)


def sort_key(question: Question, candidate: Candidate) -> tuple[float, ...]:
    """An order of candidates by `objective_value`, the best first; between equals the simpler layout is better."""
    seconds = 1 / objective_value(question, candidate)
    return _three_digits(seconds), *simplicity(candidate.layout), seconds


def rank_candidates(question: Question, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first, the others by `sort_key`. Those within RANKING_ERROR of the highest figure are a tie: the best has
    the fastest single request of these, and of equally fast ones the simplest layout."""
    by_merit = sorted(candidates, key=lambda candidate: sort_key(question, candidate))
    if not by_merit:
        return []
    least = objective_value(question, by_merit[0]) / (1 + RANKING_ERROR)
    tied = [candidate for candidate in by_merit if objective_value(question, candidate) >= least]
    best = min(tied, key=lambda candidate: _tie_order(question, candidate))
    return [best, *(candidate for candidate in by_merit if candidate is not best)]


def preference(question: Question, candidates: Sequence[Candidate]) -> Preference | None:
    """Why the first candidate is preferred to the one with the highest figure; None if it has that itself."""
    if not candidates:
        return None
    best, highest = candidates[0], max(candidates, key=lambda candidate: objective_value(question, candidate))
    if _three_digits(objective_value(question, highest)) <= _three_digits(objective_value(question, best)):
        return None
    faster = _tie_order(question, best)[0] < _tie_order(question, highest)[0]
    return Preference(highest, "single request" if faster else "simpler")


def faster_alone(question: Question, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the fastest single request, if that is faster than the first candidate's by more than
    RANKING_ERROR; else None."""
    if not candidates:
        return None
    quickest = min(candidates, key=lambda candidate: single_request_s(question, candidate.predicted))
    gain = single_request_s(question, candidates[0].predicted) / single_request_s(question, quickest.predicted)
    return quickest if gain > 1 + RANKING_ERROR else None


def _tie_order(question: Question, candidate: Candidate) -> tuple[float, ...]:
    return _three_digits(single_request_s(question, candidate.predicted)), *simplicity(candidate.layout)


def _three_digits(value: float) -> float:
    """A difference below the model's own noise is none."""
    return float(f"{value:.3g}")
