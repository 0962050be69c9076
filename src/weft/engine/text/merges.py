"""BPE merges derived from token ranks, for vocabularies that store ranks but no merges."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import TypeVar

from weft.checkpoint.files import limits

Text = TypeVar("Text", str, bytes)


def derive_merges(ranks: Mapping[Text, float]) -> list[tuple[Text, Text]]:
    """Merges in the order of their priority: the two parts that each token is merged from.

    SentencePiece and tiktoken merge the neighbours whose merge ranks lowest, the leftmost of equals, until no merge is
    a token. No merge crosses the ends of what becomes one token. A token is therefore merged as if it stood alone, and
    the last two parts left of it are its only pair. Raises ValueError for more tokens, or longer ones, than any
    published vocabulary has.
    """
    _check_size(ranks)
    merges = []
    for token, rank in ranks.items():
        parts = _last_parts(token, ranks) if _may_be_merged(token, ranks) else ()
        if len(parts) == 2 and parts[0] in ranks and parts[1] in ranks:
            merges.append((rank, parts[0], parts[1]))
    # Llama ranks all runs of spaces the same: the leftmost merge extends the longest run.
    merges.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _check_size(ranks: Mapping[Text, float]) -> None:
    sizes = list(map(len, ranks))
    longest, squares = max(sizes, default=0), sum(size * size for size in sizes)
    for what, size, most in (
        ("tokens", len(ranks), limits.CONVERTED_TOKENS),
        ("characters in a token", longest, limits.TOKEN_CHARACTERS),
        ("characters in all tokens", sum(sizes), limits.CONVERTED_CHARACTERS),
        ("characters in all tokens, each times the length of its own", squares, limits.CONVERTED_SQUARES),
    ):
        if size > most:
            raise ValueError(f"{size:,} {what}; at most {most:,} are read")


def _may_be_merged(token: Text, ranks: Mapping[Text, float]) -> bool:
    """Return True if a token is two others side by side: the merging, which takes longer, may end with them."""
    return any(token[:at] in ranks and token[at:] in ranks for at in range(1, len(token)))


def _last_parts(token: Text, ranks: Mapping[Text, float]) -> list[Text]:
    """Parts of a token after all merges but the last; more than two if no merge of them is a token."""
    size = count = len(token)
    # A part is known by its first index. `ends` has the index after its last one, or 0 if it was merged away.
    ends, before = list(range(1, size + 1)), list(range(-1, size - 1))
    candidates = [(ranks[token[at : at + 2]], at, at + 2) for at in range(size - 1) if token[at : at + 2] in ranks]
    heapify(candidates)
    while candidates and count > 2:
        _, at, end = heappop(candidates)
        middle = ends[at]
        if not 0 < middle < size or ends[middle] != end:
            continue  # one of the two has been merged with another
        ends[at], ends[middle] = end, 0
        count -= 1
        if end < size:
            before[end] = at
            _add_candidate(candidates, token, at, ends[end], ranks)
        if at:
            _add_candidate(candidates, token, before[at], end, ranks)
    return [token[at : ends[at]] for at in range(size) if ends[at]]


def _add_candidate(
    candidates: list[tuple[float, int, int]], token: Text, start: int, end: int, ranks: Mapping[Text, float]
) -> None:
    rank = ranks.get(token[start:end])
    if rank is not None:
        heappush(candidates, (rank, start, end))
