"""Claims about memory: that a model needs some, or some number of GPUs."""

from __future__ import annotations

import msgspec

from weft.checkpoint.architectures.kv import kv_bytes
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import weights_by_kind
from weft.machine.hardware.cluster import Cluster
from weft.planner.claims.claims import RESERVED_BYTES, claimed_tokens, find_layout
from weft.planner.note import Note, create_note

ROUNDED = 0.02  # guides round: "140 GB" are the 141.1 GB of 70.6 billion parameters
MUCH = 1.3  # a claim of more than this times what one request needs is said to be generous


class MemoryVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a claim of memory: `claimed_bytes` in all, compared with what weights, one request and engines
    take."""

    possible: bool
    claimed_bytes: int
    weight_bytes: int
    kv_bytes: int
    reserved_bytes: float
    note: Note


def judge_memory(
    shape: ModelShape, precision: str, tokens: int | None, memory_bytes: int, count: int, *, each: bool
) -> MemoryVerdict:
    """The verdict on a model that is said to need `memory_bytes`, in all or on each of `count` GPUs.

    It is impossible if the weights alone are larger.
    """
    tokens = claimed_tokens(shape, tokens)
    weights, cache = weights_by_kind(shape, precision).total, kv_bytes(shape, tokens, "bf16")
    claimed, reserved = memory_bytes * (count if each else 1), RESERVED_BYTES * count
    need = weights + cache + reserved
    if claimed < weights * (1 - ROUNDED):
        code = "claim_memory_too_low"
    elif claimed < need:
        code = "claim_memory_of_weights"
    else:
        code = "claim_memory_generous" if claimed > MUCH * need else "claim_memory_right"
    note = create_note(
        code,
        claimed_bytes=claimed,
        count=count,
        several=count > 1,
        below=claimed < weights,
        precision=precision,
        weight_bytes=weights,
        kv_bytes=cache,
        tokens=tokens,
        reserved_bytes=RESERVED_BYTES,
        need_bytes=need,
        # A figure in GiB that was written as GB.
        in_gib=abs(claimed / 1e9 * 2**30 / weights - 1) < ROUNDED / 4,
        gib=round(claimed / 1e9),
    )
    return MemoryVerdict(
        possible=code != "claim_memory_too_low",
        claimed_bytes=claimed,
        weight_bytes=weights,
        kv_bytes=cache,
        reserved_bytes=reserved,
        note=note,
    )


def fewest_gpus(shape: ModelShape, precision: str, cluster: Cluster, tokens: int | None) -> int | None:
    """Number of the cluster's GPUs, the first ones, that suffice for one request; None if all of them do not."""
    tokens = claimed_tokens(shape, tokens)
    for count in range(1, len(cluster.gpus) + 1):
        if find_layout(shape, precision, _first(cluster, count), tokens) is not None:
            return count
    return None


def _first(cluster: Cluster, count: int) -> Cluster:
    """The first `count` GPUs of a cluster, in its nodes."""
    nodes = []
    for node in cluster.nodes:
        kept, count = node.gpus[:count], max(0, count - len(node.gpus))
        if kept:
            nodes.append(msgspec.structs.replace(node, gpus=kept, bridged=()))
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))
