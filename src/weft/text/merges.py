"""Merges from ranks, for vocabularies that list tokens by rank but not the merges behind them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf
from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def derive_merges(ranks: Mapping[Text, float]) -> list[tuple[Text, Text]]:
    """The two parts that each token is put together from, in the order in which to look for them.

    SentencePiece and tiktoken join the neighbours whose join ranks lowest, the leftmost of equals, until none
    is a token. Within what becomes one token this goes as if it stood alone, for no join reaches across its
    ends; so a token has one pair of parts, the last ones that are left of it alone.
    """
    found = []
    for token, rank in ranks.items():
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            joins = [ranks.get(left + right, inf) for left, right in pairwise(parts)]
            lowest = min(joins)
            if lowest == inf:
                break
            at = joins.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2 and parts[0] in ranks and parts[1] in ranks:
            found.append((rank, parts[0], parts[1]))
    # Llama ranks all runs of spaces the same: the leftmost join is the one that makes the longest run longer.
    found.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in found]
