"""Guessing: what speculation takes of a rank's memory beside the model itself."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft.architectures.kv import kv_bytes_per_token
from weft.architectures.place import Place, whole
from weft.architectures.shape import DType, ModelShape
from weft.plan.fills import rank_weight_bytes
from weft.plan.plan import Speculation


class DraftBytes(NamedTuple):
    """Of a draft model on one rank: its weights, and its KV of one token."""

    weights: int = 0
    kv_per_token: int = 0


def guesses(how: Speculation | None) -> int:
    """The most that a row of a step may have, each of which is sampled after."""
    return how.tokens if how else 0


def drafting(how: Speculation | None, place: Place) -> ModelShape | None:
    """The draft model that this rank runs: whole, on the one that samples (`plan.speculation.draft_plan`)."""
    return how.draft.shape if how and how.draft and place.samples else None


def draft_bytes(how: Speculation | None, place: Place, dtype: DType, kv_dtype: str) -> DraftBytes:
    """What a rank holds of a draft model, which is in the dtype that the large one computes in."""
    shape = drafting(how, place)
    return _draft_bytes(shape, dtype, kv_dtype) if shape else DraftBytes()


@lru_cache(maxsize=64)
def _draft_bytes(shape: ModelShape, dtype: DType, kv_dtype: str) -> DraftBytes:
    place = whole(shape)
    return DraftBytes(rank_weight_bytes(shape, place, dtype, {}), kv_bytes_per_token(shape, kv_dtype, place))
