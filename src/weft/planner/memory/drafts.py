"""Memory that speculative decoding takes on a rank besides the model itself."""

from __future__ import annotations

from functools import lru_cache

from weft.checkpoint.architectures.kv import kv_bytes_per_token
from weft.checkpoint.architectures.place import Place, whole
from weft.checkpoint.architectures.shape import DType, ModelShape
from weft.plan.fills import rank_weight_bytes
from weft.plan.plan import Speculation


def draft_tokens(speculation: Speculation | None) -> int:
    """Maximum number of draft tokens in a row of a step; each of them is sampled after."""
    return speculation.tokens if speculation else 0


def draft_on_rank(speculation: Speculation | None, place: Place) -> ModelShape | None:
    """The draft model that this rank runs: the rank that samples runs it whole (`plan.speculation.draft_plan`)."""
    if speculation is None or speculation.draft is None or not place.samples:
        return None
    return speculation.draft.shape


def draft_weight_bytes(speculation: Speculation | None, place: Place, dtype: DType) -> int:
    """Bytes of the draft model's weights on this rank. `dtype` is the compute dtype of the large model, which it
    shares."""
    shape = draft_on_rank(speculation, place)
    return _weight_bytes(shape, dtype) if shape else 0


def draft_kv_bytes(speculation: Speculation | None, place: Place, kv_dtype: str) -> int:
    """Bytes of one token in the draft model's KV cache on this rank."""
    shape = draft_on_rank(speculation, place)
    return kv_bytes_per_token(shape, kv_dtype) if shape else 0


@lru_cache(maxsize=64)
def _weight_bytes(shape: ModelShape, dtype: DType) -> int:
    return rank_weight_bytes(shape, whole(shape), dtype, {})
