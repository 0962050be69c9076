"""Merges from scores, for vocabularies that list tokens and their ranks but not the merges behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def merges(scores: Mapping[Text, float], ids: Mapping[Text, int]) -> list[tuple[Text, Text]]:
    """Every way to put a token of `scores` together from two others, best token first.

    SentencePiece and tiktoken look at all neighbouring pairs and join the one whose result scores best, however
    that result divides; so each division is a merge. Ties go to the parts with the lower ids.
    """
    found = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                found.append((-score, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
