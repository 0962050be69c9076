"""Fit of a checkpoint that the engine does not run: whether its weights and KV cache have room on some hardware.

Layers are dealt out to as few devices as hold them, whole and in their order, as a pipeline. There is no prediction of
speed but its bound: a token reads all layers once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.checkpoint.outline import Outline
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.gpus import GpuSpec

UTILIZATION = 0.9  # share of a GPU's memory; of a CPU's, what is free
SET_ASIDE = 2 * 10**9  # bytes of a GPU for activations, graphs and the driver
Verdict = Literal["fits", "may fit", "does not fit"]


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True):
    """A device's layers, from `first_layer` on, and their bytes; KV bytes are the upper estimate."""

    device: int
    name: str
    first_layer: int
    layers: int
    weight_bytes: int
    kv_bytes: int
    usable_bytes: int


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict for `requests` sequences of `length` tokens.

    `bound_tok_s` is the most tokens per second of one request if each token reads all layers; None for a mixture of
    experts, of which it reads an unknown part.
    """

    verdict: Verdict
    length: int
    requests: int
    kv_low_bytes: int
    kv_high_bytes: int
    shares: tuple[DeviceShare, ...] = ()
    bound_tok_s: float | None = None


def fit_outline(
    outline: Outline, cluster: Cluster, *, length: int, requests: int, utilization: float = UTILIZATION
) -> Fit:
    """Find as few devices as hold the checkpoint and the KV cache of `requests` sequences of `length` tokens.

    "may fit": with the lower estimate of the KV cache only, or if its bytes are unknown.
    """
    low, high = (requests * (length * each + outline.kv.state) for each in (outline.kv.low, outline.kv.high))
    for verdict, kv in (("fits", high), ("may fit", low)):
        shares = _fewest(outline, cluster.gpus, kv, utilization)
        if shares:
            return Fit(
                verdict="fits" if verdict == "fits" and outline.kv.known else "may fit",
                length=length,
                requests=requests,
                kv_low_bytes=low,
                kv_high_bytes=high,
                shares=shares,
                bound_tok_s=_bound(outline, cluster, shares),
            )
    return Fit(verdict="does not fit", length=length, requests=requests, kv_low_bytes=low, kv_high_bytes=high)


def _bound(outline: Outline, cluster: Cluster, shares: Sequence[DeviceShare]) -> float | None:
    """Most tokens per second of one request, by the bandwidth with which layers are read. A token may
    read little of the other tensors, such as an embedding."""
    if outline.mixture:
        return None
    seconds = sum(
        sum(outline.layer_bytes[share.first_layer : share.first_layer + share.layers])
        / cluster.gpus[share.device].bandwidth_Bps
        for share in shares
    )
    return 1 / seconds if seconds else None


def usable_bytes(gpu: GpuSpec, utilization: float) -> int:
    """Bytes of a device for weights and KV cache."""
    if gpu.kind == "cpu":
        room = int(gpu.memory_bytes * utilization)
    else:
        room = int(gpu.memory_bytes * utilization) - gpu.held_bytes - SET_ASIDE
    return max(0, room if gpu.limit_bytes is None else min(room, gpu.limit_bytes - SET_ASIDE * (gpu.kind == "gpu")))


def _fewest(outline: Outline, gpus: Sequence[GpuSpec], kv: int, utilization: float) -> tuple[DeviceShare, ...]:
    """Shares on as few devices as hold everything, the largest first; () if all together do not."""
    largest = sorted(range(len(gpus)), key=lambda at: -usable_bytes(gpus[at], utilization))
    for count in range(1, len(gpus) + 1):
        chosen = sorted(largest[:count])
        shares = _deal(outline, gpus, chosen, kv, utilization)
        if shares:
            return shares
    return ()


def _deal(
    outline: Outline, gpus: Sequence[GpuSpec], chosen: Sequence[int], kv: int, utilization: float
) -> tuple[DeviceShare, ...]:
    """Fill the chosen devices with layers one after the other; () if some are left over. Tensors outside of layers go
    to the first device."""
    layers = len(outline.layer_bytes)
    each_kv, at, shares = -(-kv // layers), 0, list[DeviceShare]()
    for device in chosen:
        room = usable_bytes(gpus[device], utilization)
        weights, first = 0 if shares else outline.other_bytes, at
        if weights > room:
            return ()
        while at < layers and weights + outline.layer_bytes[at] + each_kv * (at - first + 1) <= room:
            weights += outline.layer_bytes[at]
            at += 1
        shares.append(
            DeviceShare(
                device=device,
                name=gpus[device].name,
                first_layer=first,
                layers=at - first,
                weight_bytes=weights,
                kv_bytes=each_kv * (at - first),
                usable_bytes=room,
            )
        )
    return tuple(shares) if at == layers else ()
