"""Ranking: the best candidate, and the tie rule by which it may go before one with a higher figure.

Two layouts of one model on one machine share the constants of the engine and of the GPUs, so most of the error of one
prediction is in the other too. RANKING_ERROR is the error that remains. It is from pairs of published measurements that
differ only in the layout (docs/planner-accuracy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.planner.deployment import DeploymentLayout
from weft.planner.memory.footprint import Footprint
from weft.planner.question import Question
from weft.planner.search.cuts import Cut
from weft.planner.speed.cost import Prediction

# Relative; 17 of 20 pairs are within it. Source: tests/pure/planner/test_accuracy.py, and the report that it is
# printed in.
RANKING_ERROR = 0.1


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that fits, with its memory and predicted speed."""

    cut: Cut
    layout: DeploymentLayout
    memory: Footprint
    predicted: Prediction


class Preference(msgspec.Struct, frozen=True):
    """`over` is the candidate with the highest figure, to which the best one is preferred; `because` is the reason."""

    over: Candidate
    because: Literal["single request", "simpler"]


def objective_value(question: Question, candidate: Candidate) -> float:
    """The figure that the objective maximises.

    For latency: requests per second if they come one at a time. For throughput: tokens per second of the whole
    deployment. For cost: tokens per second and GPU.
    """
    if question.objective == "latency":
        return 1 / request_s(question, candidate.predicted)
    rate = candidate.predicted.output_tok_s
    return rate / len(set(candidate.layout.gpus)) if question.objective == "cost" else rate


def request_s(question: Question, predicted: Prediction) -> float:
    """Seconds of a request, alone or at the concurrency that the workload gives.

    If fewer requests fit at once, the others wait, and all take longer in proportion (Little's law).
    """
    concurrency = question.workload.concurrency
    if concurrency is None:
        return single_request_s(question, predicted)
    crowded = predicted.ttft_s + question.workload.output_len * predicted.tpot_s
    return crowded * max(1.0, concurrency / predicted.concurrency)


def single_request_s(question: Question, predicted: Prediction) -> float:
    """Seconds of a request alone."""
    return predicted.ttft_s + question.workload.output_len / predicted.single_tok_s


def complexity(layout: DeploymentLayout) -> tuple[int, ...]:
    """A sort key that puts the simpler layout first."""
    cut = layout.parallelism
    return cut.replica_size, cut.pipeline_parallel, cut.expert_parallel, len(layout.gpus)


def sort_key(question: Question, candidate: Candidate) -> tuple[float, ...]:
    """A sort key by `objective_value`, the best first; of equal ones the simpler layout comes first."""
    seconds = 1 / objective_value(question, candidate)
    return _three_digits(seconds), *complexity(candidate.layout), seconds


def rank_candidates(question: Question, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best candidate first, the others by `sort_key`.

    Candidates within RANKING_ERROR of the highest figure are a tie. The best of them has the fastest single request,
    and of equally fast ones the simplest layout.
    """
    ordered = sorted(candidates, key=lambda candidate: sort_key(question, candidate))
    if not ordered:
        return []
    least = objective_value(question, ordered[0]) / (1 + RANKING_ERROR)
    tied = [candidate for candidate in ordered if objective_value(question, candidate) >= least]
    best = min(tied, key=lambda candidate: _tie_order(question, candidate))
    return [best, *(candidate for candidate in ordered if candidate is not best)]


def preference(question: Question, candidates: Sequence[Candidate]) -> Preference | None:
    """The reason to prefer the first candidate to the candidate with the highest figure; None if the first has it."""
    if not candidates:
        return None
    best, highest = candidates[0], max(candidates, key=lambda candidate: objective_value(question, candidate))
    if _three_digits(objective_value(question, highest)) <= _three_digits(objective_value(question, best)):
        return None
    faster = _tie_order(question, best)[0] < _tie_order(question, highest)[0]
    return Preference(highest, "single request" if faster else "simpler")


def faster_alone(question: Question, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the fastest single request, if it beats the first candidate by more than RANKING_ERROR."""
    if not candidates:
        return None
    quickest = min(candidates, key=lambda candidate: single_request_s(question, candidate.predicted))
    first_s = single_request_s(question, candidates[0].predicted)
    gain = first_s / single_request_s(question, quickest.predicted)
    return quickest if gain > 1 + RANKING_ERROR else None


def _tie_order(question: Question, candidate: Candidate) -> tuple[float, ...]:
    return _three_digits(single_request_s(question, candidate.predicted)), *complexity(candidate.layout)


def _three_digits(value: float) -> float:
    """Rounded to three digits: a difference below the model's own noise is none."""
    return float(f"{value:.3g}")
