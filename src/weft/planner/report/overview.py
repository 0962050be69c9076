"""Search for one model of many on the same hardware, in the precision that suits it best there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.checkpoint.quantised.precision import OF_DTYPE, weight_bytes
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.planner.question import Question
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import SearchResult, closest_miss, search

ROOMY = 4  # requests of full length that a precision leaves room for if it fits well
# Precisions smaller than the model's own, the most precise first: precisions that Weft makes by itself, and precisions
# of files that are published for other engines.
MADE_BY_WEFT = (ONLINE_QUANTIZATIONS["int8"], ONLINE_QUANTIZATIONS["int4"])
GGUF = ("q8_0", "q4_k_m")
PUBLISHED = ("fp8", "int4")
# Formats that people fetch, by the words in the names of files and repositories.
FETCHED = {"q4_k_m": "Q4_K_M", "int4": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4", "q8_0": "Q8_0", "bf16": "16 bits"}
FETCHED_BY = {"weft": ("q4_k_m", "int4", "fp8"), "llama.cpp": ("q4_k_m",)}
READING = 20.0  # tokens per second that one person is glad of: about three times as fast as one reads
CONTEXT = 8192  # tokens that a conversation with an agent or a document needs


def search_best_precision(question: Question) -> SearchResult:
    """The result in the model's own precision, or in the first smaller one that leaves room for ROOMY requests.

    If none does, the result with the longest context. If none fits, the precision that lacks the least memory.
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


def is_comfortable(tok_s: float, kv_tokens: int) -> bool:
    """Return True if one person is glad of a layout's speed and context."""
    return tok_s >= READING and kv_tokens >= CONTEXT


def for_one_person(questions: Sequence[Question]) -> tuple[Question, Candidate] | None:
    """The fastest layout for one user of the first model that is comfortable, in a format that people fetch.

    `questions` are of models that fit, the best one first, each in its own precision, or in the requested one.
    """
    for question in questions:
        candidates: list[Candidate] = []
        own = question.precisions[0]
        unquantised = own in OF_DTYPE.values()
        for precision in (*FETCHED_BY.get(question.engine, PUBLISHED), own) if unquantised else (own,):
            in_format = msgspec.structs.replace(question, precisions=(precision,), objective="latency")
            if best := search(in_format).best:
                candidates.append(best)
        comfortable = [one for one in candidates if is_comfortable(one.predicted.single_tok_s, one.memory.kv_tokens)]
        if comfortable:
            return question, max(comfortable, key=lambda one: one.predicted.single_tok_s)
    return None


def _is_roomy(result: SearchResult) -> bool:
    best, length = result.best, result.question.workload.longest
    return best is not None and best.memory.max_concurrency(length) >= ROOMY


def _kv_tokens(result: SearchResult) -> int:
    return result.best.memory.kv_tokens if result.best else 0


def precisions(question: Question) -> Iterator[str]:
    """The model's own precision, then precisions with fewer bytes in which the engine can have it."""
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
