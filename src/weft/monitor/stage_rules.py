"""Diagnosis rule of pipelines: stages of unequal time.

The head makes it hard to tell: it is as much work as several layers in a step of decodes, and next to nothing in a
step of a long prompt. A split that suits one of them suits the other less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from weft.monitor.finding import Change, Code, Finding, RuleLimits
from weft.monitor.history import History, RankShares
from weft.monitor.rank_rules import rank_numbers, stage_ranks
from weft.monitor.restart import restart_with_cut
from weft.plan.fills import rank_weight_bytes
from weft.plan.parallelism import Parallelism
from weft.plan.plan import Plan

Split = tuple[int, ...]


class StageTimes(NamedTuple):
    """Stages as they are: `layers` of each, and seconds per layer of each.

    The head was as much work as `head` layers, and may be as much as any number between the two `heads`.
    """

    layers: Split
    units: tuple[float, ...]
    head: float
    heads: tuple[float, float]

    def seconds(self, split: Split, head: float) -> float:
        """Time of the slowest stage with another split."""
        return max(work * unit for work, unit in zip(stage_work(split, head), self.units, strict=True))

    def gain(self, split: Split, head: float) -> float:
        """Share of the slowest stage's time that another split saves."""
        return 1 - self.seconds(split, head) / self.seconds(self.layers, head)

    def best_split(self) -> Split:
        """The best split that never loses, whatever the head costs; the current one if there is none."""
        candidates = [balanced_layers(sum(self.layers), self.units, head) for head in (self.head, *self.heads)]
        better = [split for split in candidates if all(self.gain(split, head) >= 0 for head in self.heads)]
        return max(better, key=lambda split: self.gain(split, self.head), default=self.layers)


def stage_imbalance(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """A pipeline whose slowest stage another split of the layers would relieve."""
    for replica, plan, ranks in _worked_pipelines(history, limits):
        times = [max(rank.counters.compute_s for rank in stage) for stage in ranks]
        layers = plan.parallelism.pipeline_split
        stages = describe_stages(layers, times, head_range(history, plan, replica, limits))
        change = Parallelism(pipeline_split=stages.best_split())
        gain = stages.gain(change.pipeline_split, stages.head)
        if gain <= limits.imbalance:
            continue
        slowest = times.index(max(times))
        yield Finding(
            code=Code.STAGE_IMBALANCE,
            text=f"stage {slowest} with {layers[slowest]} of {sum(layers)} layers computes "
            f"{max(times) / min(times):.1f} times as long as the fastest stage: another split would take {gain:.0%} "
            f"off a step (alarm above {limits.imbalance:.0%})",
            value=gain,
            limit=limits.imbalance,
            remedy=restart_with_cut(history, plan, change),
            ranks=rank_numbers(ranks[slowest]),
            stage=slowest,
            change=Change(
                replica=replica,
                parallelism=change,
                speeds=tuple(min(stages.units) / stages.units[place.stage] for place in plan.places),
            ),
        )


def _worked_pipelines(history: History, limits: RuleLimits) -> Iterator[tuple[int, Plan, list[list[RankShares]]]]:
    """Replica, plan and ranks of each stage, of the pipelines all of whose stages had enough work to tell."""
    by_plan: dict[tuple[int, int], tuple[Plan, dict[int, list[RankShares]]]] = {}
    for plan, ranks in stage_ranks(history, limits):
        place = plan.places[ranks[0].counters.local_rank]
        key = ranks[0].counters.replica, place.dp_rank
        _, by_stage = by_plan.setdefault(key, (plan, {}))
        by_stage[place.stage] = ranks
    for (replica, _), (plan, by_stage) in by_plan.items():
        if 1 < plan.stages == len(by_stage):
            yield replica, plan, [by_stage[stage] for stage in range(plan.stages)]


def describe_stages(layers: Split, times: Sequence[float], heads: tuple[float, float]) -> StageTimes:
    """The stages that took these times; of all the work that the head may have been, as much as makes the last stage
    the most like the others."""
    units = [time / count for time, count in zip(times, layers, strict=True)]
    alike = times[-1] / median(units[:-1]) - layers[-1]
    head = min(max(alike, heads[0]), heads[1])
    units[-1] = times[-1] / (layers[-1] + head)
    return StageTimes(layers, tuple(units), head, heads)


def head_range(history: History, plan: Plan, replica: int, limits: RuleLimits) -> tuple[float, float]:
    """The least and the most layers that the head is as much work as, in the steps of the history.

    In steps with many prompt tokens it may be negligible: how many tokens cost as much as the weights depends on the
    device.
    """
    most = head_layers(plan, history.weights[replica])
    per_step = history.counted("prompt_tokens") / max(1.0, history.counted("steps"))
    return (most if per_step < limits.prompt_tokens else 0.0), most


def head_layers(plan: Plan, weights: Sequence[int]) -> float:
    """The number of layers that the model's head is as much work as, by the bytes of the last stage's weights."""
    rank = plan.tensor_groups[plan.stages - 1][0]
    place = plan.places[rank]
    # The same layers, as if another stage followed.
    inner = msgspec.structs.replace(place, stages=place.stages + 1)
    layer_bytes = rank_weight_bytes(plan.shape, inner, plan.dtype, plan.schemes)
    return (weights[rank] - layer_bytes) * len(place.layers) / layer_bytes


def stage_work(layers: Sequence[int], head: float) -> list[float]:
    """Work of each stage in layers: the last one has the head too."""
    return [*layers[:-1], layers[-1] + head]


def balanced_layers(total: int, units: Sequence[float], head: float) -> Split:
    """Layers per stage, `total` in all, that make the slowest stage as fast as possible.

    `units` are the seconds per layer of each stage. The last stage also has a head, which is as much work as `head`
    layers.
    """
    split = [1] * len(units)

    def time_with_one_more(stage: int) -> float:
        return (stage_work(split, head)[stage] + 1) * units[stage]

    for _ in range(total - len(units)):
        split[min(range(len(split)), key=time_with_one_more)] += 1
    return tuple(split)
