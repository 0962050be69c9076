"""A plan as rows, one per rank: for `weft run --json` and the demo's table."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from weft.checkpoint.architectures.kv import kv_bytes_per_token
from weft.checkpoint.architectures.parameters import parameter_dims, rank_parameters
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
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
            kv_token_bytes=kv_bytes_per_token(plan.shape, plan.kv_dtype, place),
        )
        for place, device in zip(plan.places, plan.devices, strict=True)
    ]


def layout_json(plan: Plan, num_blocks: int) -> list[dict[str, Any]]:
    """JSON of the layout, one row per rank: what it holds of the model.

    `ffn` are columns, `vocab` rows, `parameters` numbers. `kv_bytes` is the size of its `num_blocks` KV blocks.
    """
    return [
        {
            "rank": row.rank,
            "replica": place.dp_rank,
            "stage": row.stage,
            "device": row.device,
            "first_layer": row.first_layer,
            "layers": len(place.layers),
            "first_q_head": place.q_heads.start,
            "q_heads": row.q_heads,
            "first_kv_head": place.kv_heads.start,
            "kv_heads": row.kv_heads,
            "ffn": row.ffn_columns,
            "vocab": row.vocab_rows,
            "first_expert": place.experts.start,
            "experts": len(place.experts),
            "parameters": count_parameters(plan.shape, place),
            "weight_bytes": row.weight_bytes,
            "kv_bytes": plan.block_bytes(row.rank) * num_blocks,
        }
        for row, place in zip(rank_rows(plan), plan.places, strict=True)
    ]


def count_parameters(shape: ModelShape, place: Place) -> int:
    """Number of parameters that a rank holds."""
    return sum(prod(parameter_dims(place, parameter)) for _, parameter, _ in rank_parameters(shape, place))
