"""Memory that speculative decoding takes on a rank beside the model itself."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft.architectures.kv import kv_bytes_per_token
from weft.architectures.place import Place, whole
from weft.architectures.shape import DType, ModelShape
from weft.plan.fills import rank_weight_bytes
from weft.plan.plan import Speculation


class DraftBytes(NamedTuple):
    """Bytes of a draft model on one rank: its weights, and the KV of one token."""

    weights: int = 0
    kv_per_token: int = 0


def draft_tokens(speculation: Speculation | None) -> int:
    """Maximum number of draft tokens in a row of a step; each of them is sampled after."""
    return speculation.tokens if speculation else 0


def draft_on_rank(speculation: Speculation | None, place: Place) -> ModelShape | None:
    """The draft model that this rank runs: the rank that samples runs it whole (`plan.speculation.draft_plan`)."""
    if speculation is None or speculation.draft is None or not place.samples:
        return None
    return speculation.draft.shape


def draft_bytes(speculation: Speculation | None, place: Place, dtype: DType, kv_dtype: str) -> DraftBytes:
    """Bytes of the draft model on this rank. `dtype` is the compute dtype of the large model, which it shares."""
    shape = draft_on_rank(speculation, place)
    return _draft_bytes(shape, dtype, kv_dtype) if shape else DraftBytes()


@lru_cache(maxsize=64)
def _draft_bytes(shape: ModelShape, dtype: DType, kv_dtype: str) -> DraftBytes:
    place = whole(shape)
    return DraftBytes(rank_weight_bytes(shape, place, dtype, {}), kv_bytes_per_token(shape, kv_dtype, place))
