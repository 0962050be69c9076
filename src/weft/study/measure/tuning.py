"""Tuning of the attention kernels' sizes on a GPU, in a child process, since this package does not import torch."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from weft.engine.processes.launch import Child, end_children
from weft.errors import ConfigError
from weft.machine.hardware import cuda
from weft.plan.plan import Plan
from weft.study.measure.links import ExaminerEnded

TUNER = "weft.ranks.probes.tuner"


class TuneRequest(msgspec.Struct, frozen=True, tag=True):
    """To the child: race the attention kernels of this plan's first rank.

    The race is run for each number of `ranks` that its heads may be cut among. `keep`: store the result for the engines
    that start on this machine.
    """

    plan: Plan
    ranks: tuple[int, ...]
    keep: bool


class RaceResult(msgspec.Struct, frozen=True, tag=True):
    """Seconds of a layer by kernel sizes, for one race, and why other sizes were excluded."""

    title: str
    seconds: dict[str, float]
    obstacles: dict[str, str]


class TunedSizes(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sizes that engines use from now on for this number of heads; decode's by the numbers of rows measured. `path` is
    the file that holds them; `lost` says why they could not be stored."""

    q_heads: int
    kv_heads: int
    decode: dict[int, str]
    prefill: str
    path: str = ""
    lost: str = ""


FromTuner = RaceResult | TunedSizes | ExaminerEnded


def tune_attention(
    plan: Plan, ranks: tuple[int, ...], *, keep: bool, report: Callable[[RaceResult], object], tuner: str = TUNER
) -> list[TunedSizes]:
    """Measure on the plan's first device; `report` gets the result of every race. Raises ConfigError on failure."""
    child: Child[FromTuner] = Child(tuner, FromTuner, env=cuda.device_order_variables(os.environ))
    tuned: list[TunedSizes] = []
    try:
        child.send(TuneRequest(plan, ranks, keep))
        for message in child.channel:
            match message:
                case RaceResult():
                    report(message)
                case TunedSizes():
                    tuned.append(message)
                case ExaminerEnded(reason=""):
                    return tuned
                case ExaminerEnded(reason=reason):
                    raise ConfigError(
                        f"the sizes of attention cannot be measured: {reason}", code="cannot-measure-attention"
                    )
        raise ConfigError(
            f"the sizes of attention cannot be measured: {child.describe_exit().cause}", code="cannot-measure-attention"
        )
    finally:
        end_children([child])
        child.close()
