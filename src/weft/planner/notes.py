"""Notes: what a reader of a plan has to know beside its figures."""

from __future__ import annotations

from collections.abc import Iterator

from weft.facts.precision import scale_columns
from weft.planner.objections import EVEN
from weft.planner.question import Question
from weft.planner.search import Candidate


def notes(question: Question, best: Candidate | None) -> list[str]:
    """One line each; none where there is nothing to say."""
    return [*_too_long(question), *(_padding(question, best) if best else ())]


def _too_long(question: Question) -> Iterator[str]:
    """The engine may be told to go further than the model was made for, so it is planned all the same."""
    asked, most = question.workload.longest, question.shape.longest
    if asked > most:
        yield f"a request of {asked:,} tokens is longer than the {most:,} that the model was made for"


def _padding(question: Question, best: Candidate) -> Iterator[str]:
    """Engines that cut evenly need whole groups of columns, those that share a scale, on every rank."""
    ranks, precision = best.layout.tensor_parallel, best.layout.precision
    group, experts = scale_columns(question.shape, precision), question.shape.experts
    if question.engine not in EVEN or ranks == 1 or group == 1:
        return
    widths = {"MLP": question.shape.ffn}
    if experts:
        dealt = best.layout.expert_parallel > 1
        # Where every layer has experts there is no other MLP.
        widths = {"MLP": question.shape.ffn if experts.dense_layers else 0, "experts": 0 if dealt else experts.ffn}
    for name, width in widths.items():
        padded = -(-width // (group * ranks)) * group * ranks
        if padded != width:
            yield (
                f"{question.engine} cuts evenly and in whole groups of {group} columns: {width:,} of the {name} over "
                f"{ranks} ranks need an {precision} checkpoint that is padded to {padded:,}"
            )
