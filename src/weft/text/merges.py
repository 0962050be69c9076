"""BPE merges derived from token ranks, for vocabularies that store ranks but no merges."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf
from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def derive_merges(ranks: Mapping[Text, float]) -> list[tuple[Text, Text]]:
    """Merges in the order of their priority: the two parts that each token is merged from.

    SentencePiece and tiktoken merge the neighbours whose merge ranks lowest, the leftmost of equals, until no merge is
    a token. No merge crosses the ends of what becomes one token. A token is therefore merged as if it stood alone, and
    the last two parts left of it are its only pair.
    """
    merges = []
    for token, rank in ranks.items():
        parts = _last_parts(token, ranks)
        if len(parts) == 2 and parts[0] in ranks and parts[1] in ranks:
            merges.append((rank, parts[0], parts[1]))
    # Llama ranks all runs of spaces the same: the leftmost merge is the one that extends the longest run.
    merges.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _last_parts(token: Text, ranks: Mapping[Text, float]) -> list[Text]:
    """Parts of a token after all merges but the last; more than two if no merge of them is a token."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        merged = [ranks.get(left + right, inf) for left, right in pairwise(parts)]
        lowest = min(merged)
        if lowest == inf:
            break
        at = merged.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
