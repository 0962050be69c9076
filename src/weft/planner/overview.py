"""Search for one model of many on the same hardware, in the precision that suits it best there."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.formats.precision import weight_bytes
from weft.formats.schemes import ONLINE_QUANTIZATIONS
from weft.planner.question import Question
from weft.planner.ranking import Candidate
from weft.planner.search import SearchResult, closest_miss, search

ROOMY = 4  # requests of full length that a precision leaves room for if it fits well
# Precisions smaller than the model's own, the most precise first: those that Weft makes by itself, and those in which
# files are published for other engines.
MADE_BY_WEFT = (ONLINE_QUANTIZATIONS["int8"], ONLINE_QUANTIZATIONS["int4"])
GGUF = ("q8_0", "q4_k_m")
PUBLISHED = ("fp8", "int4")


def search_best_precision(question: Question) -> SearchResult:
    """The result in the model's own precision, or in the first smaller one that leaves room for ROOMY requests.

    If none does, the result with the longest context. If none fits, the one that lacks the least memory.
    """
    results = []
    for precision in precisions(question):
        result = search(msgspec.structs.replace(question, precisions=(precision,)))
        results.append(result)
        if _is_roomy(result):
            return result
    fitting = [result for result in results if result.best]
    if fitting:
        return max(fitting, key=_kv_tokens)
    return min(results, key=lambda result: short_bytes(result) or float("inf"))


def _is_roomy(result: SearchResult) -> bool:
    best, length = result.best, result.question.workload.longest
    return best is not None and best.memory.max_concurrency(length) >= ROOMY


def _kv_tokens(result: SearchResult) -> int:
    return result.best.memory.kv_tokens if result.best else 0


def precisions(question: Question) -> Iterator[str]:
    """The model's own precision, then those with fewer bytes that the engine can have it in."""
    own = question.precisions[0]
    yield own
    smaller = {"weft": MADE_BY_WEFT, "llama.cpp": GGUF}.get(question.engine, PUBLISHED)
    bytes_now = weight_bytes(question.shape, own)
    yield from (name for name in smaller if name != own and weight_bytes(question.shape, name) < bytes_now)


def short_bytes(result: SearchResult) -> int:
    """Bytes that the closest layout lacks on its fullest GPU; 0 if memory is not the reason."""
    miss = closest_miss(result.rejected)
    return miss.short_bytes if miss else 0


def layout_name(candidate: Candidate) -> str:
    """ "TP 2 x DP 2", "one GPU": a cut without its precision."""
    return str(candidate.cut).removesuffix(f", {candidate.cut.precision}")
