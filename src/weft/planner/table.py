"""A plan as rows, one per rank: for `weft run --json` and the demo's table."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.plan.plan import Plan


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share. `first_layer` and `last_layer` are the numbers of its layers, both included; the other
    counts are heads, columns, rows. `kv_token_bytes` are the bytes of one token in its KV cache."""

    rank: int
    stage: int
    device: str
    first_layer: int
    last_layer: int
    q_heads: int
    kv_heads: int
    ffn_columns: int
    vocab_rows: int
    weight_bytes: int
    kv_token_bytes: int


def rank_rows(plan: Plan) -> list[RankRow]:
    """One row per rank, in rank order."""
    return [
        RankRow(
            rank=place.rank,
            stage=place.stage,
            device=device.name,
            first_layer=place.layers.start,
            last_layer=place.layers.stop - 1,
            q_heads=len(place.q_heads),
            kv_heads=len(place.kv_heads),
            ffn_columns=len(place.ffn),
            vocab_rows=len(place.vocab) if place.first or place.last else 0,
            weight_bytes=plan.weight_bytes(place.rank),
            kv_token_bytes=plan.block_bytes(place.rank) // plan.block_size,
        )
        for place, device in zip(plan.places, plan.devices, strict=True)
    ]


def layout_json(plan: Plan, num_blocks: int) -> list[dict[str, Any]]:
    """JSON of the layout: counts per rank. `kv_bytes` is the size of the rank's KV cache of `num_blocks` blocks."""
    return [
        {
            "rank": row.rank,
            "device": row.device,
            "layers": row.last_layer - row.first_layer + 1,
            "q_heads": row.q_heads,
            "kv_heads": row.kv_heads,
            "weight_bytes": row.weight_bytes,
            "kv_bytes": row.kv_token_bytes * plan.block_size * num_blocks,
        }
        for row in rank_rows(plan)
    ]
