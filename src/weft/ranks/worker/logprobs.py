"""Logprobs of tokens, from the figures of `Sampling.score`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.core.step import TokenLogprobs


def split_logprobs(
    values: list[float], count: int, rows: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Logprobs of `count` rows, None except for `rows`, whose scores follow the first `count` of the `values`."""
    logprobs: list[TokenLogprobs | None] = [None] * count
    if rows:
        width = (len(values) - count) // len(rows)
        for row, begin, top in zip(rows, range(count, len(values), width), tops, strict=True):
            logprobs[row] = unpack_logprobs(values[begin : begin + width], top)
    return logprobs


def unpack_logprobs(row: list[float], top: int) -> TokenLogprobs:
    """Convert one row of the figures, with its first `top` alternatives."""
    width = len(row) // 2 - 1
    ids, logprobs = row[2 : 2 + top], row[2 + width : 2 + width + top]
    return TokenLogprobs(row[0], int(row[1]), [int(token) for token in ids], logprobs)
