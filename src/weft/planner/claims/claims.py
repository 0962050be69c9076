"""Claims: the check of a statement that a model runs on some GPUs, and at some speed; text.py has the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from weft.checkpoint.architectures.kv import kv_bytes
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import canonical, weights_by_kind
from weft.errors import PlanError
from weft.formatting import format_counts
from weft.machine.hardware.cluster import Cluster
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import DeploymentLayout, deploy
from weft.planner.note import Note, create_note
from weft.planner.search.domains import Device, cluster_devices
from weft.planner.search.stages import RankCapacity, layers_by_capacity, weight_bytes_per_token

RESERVED_BYTES = 1.5e9  # bytes of each GPU: context, workspace and activations of any engine
TOKENS = 2048  # tokens of the one request, if the claim gives no length


class ClaimVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a claim, with the arithmetic.

    `weight_bytes` and `kv_bytes` are the model's and the request's, `usable_bytes` all GPUs' together. A token reads
    `read_bytes` of weights, and `bound_tok_s` is the most that memory bandwidth allows one request; None for cards of
    which only the memory is known. `layout` is one that has the room, or None.
    """

    possible: bool
    weight_bytes: int
    kv_bytes: int
    usable_bytes: float
    read_bytes: float
    bound_tok_s: float | None
    reasons: tuple[Note, ...]
    layout: DeploymentLayout | None


def claimed_tokens(shape: ModelShape, tokens: int | None) -> int:
    """Tokens of the one request: the claim's, else TOKENS, or fewer if the model's context is shorter."""
    return min(TOKENS, shape.longest) if tokens is None else tokens


def judge_claim(
    shape: ModelShape,
    precision: str,
    cluster: Cluster,
    tokens: int | None,
    tok_s: float | None,
    *,
    tensor: int | None = None,
) -> ClaimVerdict:
    """The verdict on a claim. It is impossible only if no layout can do it.

    Either the weights and the KV of one request exceed the GPUs' memory less RESERVED_BYTES each, for every cut of the
    model (with `tensor` ranks in a stage, if given). Or the speed exceeds the bandwidth of all GPUs together.
    """
    tokens = claimed_tokens(shape, tokens)
    gpus = [device.gpu for device in cluster_devices(cluster)]
    model = weights_by_kind(shape, precision)
    cache = kv_bytes(shape, tokens, "bf16")
    usable = [gpu.memory_bytes - RESERVED_BYTES for gpu in gpus]
    read = weight_bytes_per_token(shape, model)
    bandwidth = sum(gpu.bandwidth_Bps for gpu in gpus)
    bound = bandwidth / read if all(gpu.bandwidth_Bps for gpu in gpus) else None
    reasons = []
    layout = find_layout(shape, precision, cluster, tokens, tensor)
    if layout is None:
        reasons.append(_too_large(model.total, cache, tokens, usable, cluster))
    if tok_s is not None and bound is not None and tok_s > bound:
        reasons.append(
            create_note(
                "claim_too_fast",
                tok_s=tok_s,
                bound_tok_s=bound,
                read_bytes=read,
                gpus=_gpu_names(cluster),
                several=len(gpus) > 1,
                bandwidth_bytes=bandwidth,
            )
        )
    return ClaimVerdict(
        possible=not reasons,
        weight_bytes=model.total,
        kv_bytes=cache,
        usable_bytes=sum(usable),
        read_bytes=read,
        bound_tok_s=bound,
        reasons=tuple(reasons),
        layout=layout,
    )


def find_layout(
    shape: ModelShape, precision: str, cluster: Cluster, tokens: int, fixed: int | None = None
) -> DeploymentLayout | None:
    """A layout with which the weights and the KV of `tokens` tokens fit every GPU, cut as finely as possible, or
    None. `fixed` is the number of ranks of a stage, if the claim has it."""
    # The largest GPUs first, so that GPUs of similar size are neighbours.
    devices = sorted(cluster_devices(cluster), key=lambda device: -device.gpu.memory_bytes)
    usable = [device.gpu.memory_bytes - RESERVED_BYTES for device in devices]
    if weights_by_kind(shape, precision).total > sum(usable):
        return None
    for tensor, stages, dealt in _cuts(shape, len(devices)):
        if fixed not in (None, tensor):
            continue
        for shares in _shares(usable, tensor, stages):
            try:
                layout = _lay_out(shape, precision, tokens, devices, shares, stages, dealt)
            except PlanError:  # more ranks than the model has heads or columns for
                continue
            if layout is not None:
                return layout
    return None


def _lay_out(
    shape: ModelShape,
    precision: str,
    tokens: int,
    devices: Sequence[Device],
    shares: tuple[float, ...],
    stages: int,
    dealt: bool,
) -> DeploymentLayout | None:
    """A layout with these shares of each stage, or None if it does not fit. Raises PlanError as `deploy`."""
    usable = [device.gpu.memory_bytes - RESERVED_BYTES for device in devices]
    layers = _layers(shape, precision, tokens, usable, shares, stages, dealt)
    if layers is None:
        return None
    layout = deploy(
        shape,
        Parallelism(
            expert_parallel=len(shares) if dealt else 1,
            deals_experts=dealt,
            tensor_split=shares,
            pipeline_split=layers,
            devices=tuple(device.number for device in devices[: len(shares) * stages]),
        ),
        precision=precision,
        kv_dtype="bf16",
    )
    held = (_held_bytes(shape, precision, tokens, place) for place in layout.places)
    return layout if all(size <= room for size, room in zip(held, usable, strict=False)) else None


def _cuts(shape: ModelShape, gpus: int) -> Iterator[tuple[int, int, bool]]:
    """(ranks of a stage, stages, whole experts per rank), the finest cuts first."""
    for tensor in range(min(gpus, shape.q_heads), 0, -1):
        for stages in range(min(gpus // tensor, len(shape.layers)), 0, -1):
            yield tensor, stages, False
            if shape.experts and 1 < tensor <= shape.experts.count:
                yield tensor, stages, True


def _shares(usable: Sequence[float], tensor: int, stages: int) -> list[tuple[float, ...]]:
    """Equal shares, and shares by the memory of the smallest GPU of each position."""
    by_room = tuple(max(1.0, min(usable[rank : tensor * stages : tensor])) for rank in range(tensor))
    return list(dict.fromkeys([(1.0,) * tensor, by_room] if len(set(by_room)) > 1 else [(1.0,) * tensor]))


def _layers(
    shape: ModelShape,
    precision: str,
    tokens: int,
    usable: Sequence[float],
    shares: Sequence[float],
    stages: int,
    dealt: bool,
) -> tuple[int, ...] | None:
    tensor = len(shares)
    capacities = [[RankCapacity(room, 1.0) for room in usable[at * tensor : (at + 1) * tensor]] for at in range(stages)]
    experts = tensor if dealt else 1
    kind = canonical(precision)
    return layers_by_capacity(shape, kind, "bf16", tokens, shares, capacities, expert_parallel=experts, by_room=True)


def _held_bytes(shape: ModelShape, precision: str, tokens: int, place: Place) -> int:
    return weights_by_kind(shape, precision, place).total + kv_bytes(shape, tokens, "bf16", place)


def _gpu_names(cluster: Cluster) -> str:
    return format_counts(device.gpu.name for device in cluster_devices(cluster))


def _too_large(weight: int, cache: int, tokens: int, usable: Sequence[float], cluster: Cluster) -> Note:
    count = len(usable)
    need, total = weight + cache, sum(usable)
    return create_note(
        "claim_too_large",
        weight_bytes=weight,
        kv_bytes=cache,
        tokens=tokens,
        gpus=_gpu_names(cluster),
        several=count > 1,
        gpu_need_bytes=need / count,
        usable_bytes=total,
        gpu_usable_bytes=max(usable),
        reserved_bytes=RESERVED_BYTES,
        short_bytes=max(0, need - total),
    )
