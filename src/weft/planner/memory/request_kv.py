"""RequestKV: the KV of requests under an engine, in bytes and blocks, and how many requests fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from weft.checkpoint.architectures.kv import KVLayout, kv_bytes, kv_bytes_per_token, kv_layout, kv_specs
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
from weft.plan.plan import Speculation
from weft.planner.memory.drafts import draft_kv_bytes
from weft.planner.profiles import OURS, EngineProfile

BLOCK = 16  # tokens of a KV block, EngineConfig.block_size


class KVRoom(Protocol):
    """A rank's room for KV, in bytes."""

    @property
    def kv_room_bytes(self) -> int: ...

    @property
    def kv_block_bytes(self) -> int: ...


class RequestKV(msgspec.Struct, frozen=True):
    """The KV of requests of a model under an engine.

    Our engine keeps it in the blocks of `layout`. The same count is used for other engines, with one group that keeps
    all tokens. `window_cache`: an engine other than ours keeps no more of a layer with a window than the window.
    """

    shape: ModelShape
    kv_dtype: str
    speculation: Speculation | None
    layout: KVLayout
    window_cache: bool

    @property
    def in_blocks(self) -> bool:
        """True if KV groups decide what fits; a single group that keeps all tokens is counted to the byte."""
        return self.layout.has_windows

    @property
    def keeps_windows(self) -> bool:
        """True if a request's bytes do not grow evenly with its length."""
        return self.in_blocks or self.window_cache

    def token_bytes(self, place: Place) -> int:
        """Bytes of one token in all layers of a rank, with a draft model's."""
        own = kv_bytes_per_token(self.shape, self.kv_dtype, place)
        return own + draft_kv_bytes(self.speculation, place, self.kv_dtype)

    def block_bytes(self, place: Place) -> int:
        """Bytes of one block on a rank."""
        if self.in_blocks:
            return _block_bytes(self.layout, self.shape, self.kv_dtype, place)
        return BLOCK * self.token_bytes(place)

    def request_bytes(self, place: Place, length: int) -> int:
        """Bytes of one request of `length` tokens on a rank."""
        if self.in_blocks:
            return self.layout.blocks(length) * self.block_bytes(place)
        if self.window_cache:
            return _kv_bytes(self.shape, length, self.kv_dtype, place)
        return length * self.token_bytes(place)

    def requests(self, places: Sequence[Place], ranks: Sequence[KVRoom], length: int) -> float:
        """Number of requests of `length` tokens that fit on these ranks: the minimum over the ranks."""
        if self.in_blocks:
            return self.layout.requests(num_blocks(ranks), length)
        pairs = zip(places, ranks, strict=True)
        needs = {(rank.kv_room_bytes, self.request_bytes(place, length)) for place, rank in pairs}
        return min(max(0, room) / need for room, need in needs)


def num_blocks(ranks: Sequence[KVRoom]) -> int:
    """Number of KV blocks that every rank has room for."""
    return max(0, min(rank.kv_room_bytes // rank.kv_block_bytes for rank in ranks))


def request_kv(shape: ModelShape, kv_dtype: str, profile: EngineProfile) -> RequestKV:
    """The KV of requests of a model under an engine."""
    window_cache, speculation = bool(profile.window_cache.value) and shape.has_windows, profile.speculation
    # A draft model shares the blocks, and needs those behind a window (`Plan.window_cache`).
    frees = window_cache and profile.name == OURS and not (speculation and speculation.draft)
    layout = _layout(shape, profile.batch_limits(0)[0], frees)
    return RequestKV(shape, kv_dtype, speculation, layout, window_cache and profile.name != OURS)


@lru_cache(maxsize=256)
def _layout(shape: ModelShape, chunk: int, window_cache: bool) -> KVLayout:
    return kv_layout(shape, block_size=BLOCK, chunk=chunk, window_cache=window_cache)


@lru_cache(maxsize=4096)
def _kv_bytes(shape: ModelShape, tokens: int, kv_dtype: str, place: Place) -> int:
    return kv_bytes(shape, tokens, kv_dtype, place)


@lru_cache(maxsize=4096)
def _block_bytes(layout: KVLayout, shape: ModelShape, kv_dtype: str, place: Place) -> int:
    return layout.block_bytes(kv_specs(shape, kv_dtype, place))
