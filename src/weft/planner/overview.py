"""Overview: one model of many on the same hardware, in the precision that suits it there."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.formats.precision import weight_bytes
from weft.formats.schemes import ONLINE_QUANTIZATIONS
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import Answer, closest, search

ROOMY = 4  # requests of full length that a precision leaves room for if it fits well
# Smaller than the model's own, the most precise first: what Weft makes by itself, what files there are for others.
MADE_BY_WEFT = (ONLINE_QUANTIZATIONS["int8"], ONLINE_QUANTIZATIONS["int4"])
GGUF = ("q8_0", "q4_k_m")
PUBLISHED = ("fp8", "int4")


def in_best_precision(question: Question) -> Answer:
    """The answer in the model's own precision, or in the first smaller one that leaves room for ROOMY requests.

    If none does, the one with the longest context; if none fits, the one that lacks least.
    """
    answers = []
    for precision in precisions(question):
        answer = search(msgspec.structs.replace(question, precisions=(precision,)))
        answers.append(answer)
        if answer.best and answer.best.memory.max_concurrency(question.workload.longest) >= ROOMY:
            return answer
    fitting = [(best.memory.kv_tokens, answer) for answer in answers if (best := answer.best)]
    if fitting:
        return max(fitting, key=lambda row: row[0])[1]
    return min(answers, key=lambda answer: short_bytes(answer) or float("inf"))


def precisions(question: Question) -> Iterator[str]:
    """The model's own precision, then those with fewer bytes that the engine can have it in."""
    own = question.precisions[0]
    yield own
    smaller = {"weft": MADE_BY_WEFT, "llama.cpp": GGUF}.get(question.engine, PUBLISHED)
    bytes_now = weight_bytes(question.shape, own)
    yield from (name for name in smaller if name != own and weight_bytes(question.shape, name) < bytes_now)


def short_bytes(answer: Answer) -> int:
    """Bytes that the closest layout lacks on its fullest GPU; 0 if it is not for want of memory."""
    lacking = closest(answer.rejected)
    return lacking.short_bytes if lacking else 0


def layout_name(candidate: Candidate) -> str:
    """ "TP 2 x DP 2", "one GPU": a cut without its precision."""
    return str(candidate.cut).removesuffix(f", {candidate.cut.precision}")
