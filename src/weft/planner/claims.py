"""Claims: whether a model can be on some GPUs at all, and answer as fast as somebody says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from weft.architectures.kv import kv_bytes
from weft.architectures.place import Place
from weft.architectures.shape import ModelShape
from weft.errors import ConfigError, PlanError
from weft.formats.precision import canonical, weights
from weft.formatting import format_counts
from weft.hardware.cluster import Cluster
from weft.planner.deployment import Layout, deploy
from weft.planner.domains import devices
from weft.planner.stages import Seat, read_bytes, stage_layers

RESERVED_BYTES = 1.5e9  # of each GPU: context, workspace and activations of any engine
TOKENS = 2048  # of the one request, where the claim names no length

FORM = "MODEL PRECISION on NxGPU[ at N tokens][, X tok/s]"
CLAIM = re.compile(
    r"(?P<model>.+?)\s+(?P<precision>\S+)\s+on\s+(?P<gpus>(?:(?!\s+at\s)[^,])+?)"
    r"(?:\s+at\s+(?P<tokens>[\d,_]+)\s+tokens?)?"
    r"(?:\s*,\s*(?P<speed>\d[\d,_.]*)\s*(?:tok(?:en)?s?)(?:/s|\s+per\s+second))?",
    re.IGNORECASE,
)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody says, in their words: `gpus` is a description of hardware, `tok_s` one request's speed."""

    model: str
    precision: str
    gpus: str
    tokens: int = TOKENS
    tok_s: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`possible`, and the arithmetic. `weight_bytes` and `kv_bytes` are the model's and the request's, `have_bytes`
    is what may be used of all GPUs together. A token reads `read_bytes`, and `bound_tok_s` is what the memory's
    bandwidth allows one request. `layout` is one that has the room, None where there is none."""

    possible: bool
    weight_bytes: int
    kv_bytes: int
    have_bytes: float
    read_bytes: float
    bound_tok_s: float
    reasons: tuple[str, ...]
    layout: Layout | None


def parse(text: str) -> Claim:
    """Raises ConfigError for a text that is no claim."""
    found = CLAIM.fullmatch(" ".join(text.split()))
    if found is None:
        raise ConfigError(
            f"cannot read the claim {text!r}; say {FORM}, as in Qwen2.5-72B-Instruct fp16 on 1xH100, 50 tok/s"
        )
    tokens = int(re.sub("[,_]", "", found["tokens"])) if found["tokens"] else TOKENS
    try:
        speed = float(re.sub("[,_]", "", found["speed"])) if found["speed"] else None
    except ValueError:
        raise ConfigError(f"{found['speed']!r} in the claim is no number of tokens per second") from None
    if tokens < 1 or speed == 0:
        raise ConfigError(f"the claim {text!r} speaks of 0 tokens; give 1 or more")
    return Claim(
        model=found["model"], precision=found["precision"], gpus=found["gpus"].strip(), tokens=tokens, tok_s=speed
    )


def judge(shape: ModelShape, precision: str, cluster: Cluster, tokens: int, tok_s: float | None) -> Verdict:
    """Impossible is what no layout can do: weights and the KV of one request exceed the GPUs' memory less 1.5 GB
    each, however the model is cut; or the speed asks for more than all of the GPUs' bandwidth."""
    gpus = [device.gpu for device in devices(cluster)]
    held = weights(shape, precision)
    cache = kv_bytes(shape, tokens, "bf16")
    usable = [gpu.memory_bytes - RESERVED_BYTES for gpu in gpus]
    read = read_bytes(shape, held)
    bound = sum(gpu.bandwidth_Bps for gpu in gpus) / read
    reasons = []
    layout = fitting(shape, precision, cluster, tokens)
    if layout is None:
        reasons.append(_too_large(held.total, cache, tokens, usable, cluster))
    if tok_s is not None and tok_s > bound:
        reasons.append(
            f"{tok_s:g} tok/s is more than the {bound:.1f} that the memory's bandwidth allows: each token reads "
            f"{read / 1e9:.1f} GB of weights and {_of(cluster)} read{'s' * (len(gpus) == 1)} "
            f"{sum(gpu.bandwidth_Bps for gpu in gpus) / 1e9:,.0f} GB/s"
        )
    return Verdict(
        possible=not reasons,
        weight_bytes=held.total,
        kv_bytes=cache,
        have_bytes=sum(usable),
        read_bytes=read,
        bound_tok_s=bound,
        reasons=tuple(reasons),
        layout=layout,
    )


def fitting(shape: ModelShape, precision: str, cluster: Cluster, tokens: int) -> Layout | None:
    """Some layout that leaves every GPU with its weights and the KV of `tokens` tokens within what may be used of
    it, cut as finely as possible; None where there is no such layout."""
    # The largest GPUs first, so that those of like size are together.
    there = sorted(devices(cluster), key=lambda device: -device.gpu.memory_bytes)
    usable = [device.gpu.memory_bytes - RESERVED_BYTES for device in there]
    if weights(shape, precision).total > sum(usable):
        return None
    for tensor, stages, dealt in _cuts(shape, len(there)):
        for shares in _shares(usable, tensor, stages):
            try:
                layers = _layers(shape, precision, tokens, usable, shares, stages, dealt)
                if layers is None:
                    continue
                layout = deploy(
                    shape,
                    tensor_weights=shares,
                    stage_layers=layers,
                    gpus=[device.number for device in there[: tensor * stages]],
                    precision=precision,
                    kv_dtype="bf16",
                    expert_parallel=dealt,
                )
            except PlanError:  # more ranks than the model has heads or columns for
                continue
            held = (_held(shape, precision, tokens, place) for place in layout.places)
            if all(size <= room for size, room in zip(held, usable, strict=False)):
                return layout
    return None


def _cuts(shape: ModelShape, gpus: int) -> Iterator[tuple[int, int, bool]]:
    """(ranks of a stage, stages, whether experts are dealt out whole), those that cut finest first."""
    for tensor in range(min(gpus, shape.q_heads), 0, -1):
        for stages in range(min(gpus // tensor, shape.layers), 0, -1):
            yield tensor, stages, False
            if shape.experts and 1 < tensor <= shape.experts.count:
                yield tensor, stages, True


def _shares(usable: Sequence[float], tensor: int, stages: int) -> list[tuple[float, ...]]:
    """Equal shares, and shares by what the smallest GPU of each position can take."""
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
    seats = [[Seat(room, 1.0) for room in usable[at * tensor : (at + 1) * tensor]] for at in range(stages)]
    group = (0, 1) if dealt else None
    kind = canonical(precision)
    return stage_layers(shape, kind, "bf16", tokens, shares, seats, expert_group=group, by_room=True)


def _held(shape: ModelShape, precision: str, tokens: int, place: Place) -> int:
    return weights(shape, precision, place).total + kv_bytes(shape, tokens, "bf16", place)


def _of(cluster: Cluster) -> str:
    return format_counts(device.gpu.name for device in devices(cluster))


def _too_large(weight: int, cache: int, tokens: int, usable: Sequence[float], cluster: Cluster) -> str:
    count = len(usable)
    need, have = weight + cache, sum(usable)
    told = f"{weight / 1e9:.1f} GB of weights and {cache / 1e9:.2f} GB of KV for {tokens:,} tokens"
    each = f", {need / count / 1e9:.1f} GB on each," if count > 1 else ""
    one = f", {max(usable) / 1e9:.1f} GB on one" if count > 1 else ""
    short = f"; {(need - have) / 1e9:.1f} GB short" if need > have else ""
    return (
        f"{told}{each} do not fit {_of(cluster)}: {have / 1e9:.1f} GB usable{one} after {RESERVED_BYTES / 1e9} GB "
        f"{'on each ' if count > 1 else ''}for the driver and engine{short}"
    )
