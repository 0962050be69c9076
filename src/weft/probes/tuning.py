"""Tuning: the attention kernels' sizes measured on a GPU; in a child, since torch stays with the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from weft.errors import ConfigError
from weft.executors.launch import Child, end_children
from weft.hardware import cuda
from weft.plan.plan import Plan
from weft.probes.links import Ended

TUNER = "weft.probes.on_gpu.tuner"


class Tune(msgspec.Struct, frozen=True, tag=True):
    """To the child: measure what the first rank of this plan attends with, and what it would as one of so many ranks
    that its heads are cut among; `keep` it for the engines that start here."""

    plan: Plan
    ranks: tuple[int, ...]
    keep: bool


class Raced(msgspec.Struct, frozen=True, tag=True):
    """Seconds of a layer by the sizes that did `what`, and why others were passed over."""

    what: str
    seconds: dict[str, float]
    obstacles: dict[str, str]


class Tuned(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The sizes that engines use from now on for so many heads: of decode by the rows that were measured. `path` is
    where they are kept, `lost` why they are not."""

    q_heads: int
    kv_heads: int
    decode: dict[int, str]
    prefill: str
    path: str = ""
    lost: str = ""


FromTuner = Raced | Tuned | Ended


def tune(
    plan: Plan, ranks: tuple[int, ...], *, keep: bool, tell: Callable[[Raced], object], tuner: str = TUNER
) -> list[Tuned]:
    """Measure on the plan's first device; `tell` hears of every race. Raises ConfigError where that cannot be done."""
    child: Child[FromTuner] = Child(tuner, FromTuner, env=cuda.order(os.environ))
    found: list[Tuned] = []
    try:
        child.send(Tune(plan, ranks, keep))
        for news in child.channel:
            match news:
                case Raced():
                    tell(news)
                case Tuned():
                    found.append(news)
                case Ended(reason=""):
                    return found
                case Ended(reason=reason):
                    raise ConfigError(f"the sizes of attention cannot be measured: {reason}")
        raise ConfigError(f"the sizes of attention cannot be measured: {child.describe_exit()[0]}")
    finally:
        end_children([child])
        child.close()
