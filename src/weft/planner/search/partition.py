"""Layers per pipeline stage, for stages or layers that differ."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import msgspec

ROUNDING = 1 + 1e-12  # a bound that layers meet exactly must not fail by rounding


class StageBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity of a stage: `speed` in work per second, `room` in bytes. `work` and `size` are its load besides its
    layers (the embedding, the head)."""

    speed: float
    room: float
    work: float = 0.0
    size: float = 0.0


def partition_layers(
    work: Sequence[float], sizes: Sequence[float], stages: Sequence[StageBudget]
) -> tuple[int, ...] | None:
    """Layers per stage, in order, so that each stage has the room and the slowest stage is as fast as possible.

    `work[l]` is the cost of layer l, `sizes[l]` its bytes. If several partitions have the fastest slowest stage, the
    result is one whose stages end as evenly as possible. None if no partition has the room, or if there are fewer
    layers than stages.
    """
    search = _Search(work, sizes, stages)
    if not search.possible(0, 0, inf):
        return None
    # The time of the slowest stage lies between all work at all speeds together, and all work on the slowest stage.
    total = search.work[-1] + sum(stage.work for stage in stages)
    low, high = total / sum(stage.speed for stage in stages), total / min(stage.speed for stage in stages)
    for _ in range(32):  # to one part in 10**9
        middle = (low + high) / 2
        low, high = (low, middle) if search.possible(0, 0, middle) else (middle, high)
    return search.even(high)


class _Search:
    """Contiguous runs of layers by their prefix sums: every query takes one bisection per stage."""

    def __init__(self, work: Sequence[float], sizes: Sequence[float], stages: Sequence[StageBudget]) -> None:
        self.stages = stages
        self.layers = len(work)
        self.work = [0.0, *accumulate(work)]
        self.sizes = [0.0, *accumulate(sizes)]

    def reach(self, stage: int, start: int, limit: float) -> int:
        """The latest end (exclusive) of a stage that begins at layer `start`, to take at most `limit` seconds."""
        budget = self.stages[stage]
        by_time = bisect_right(self.work, self.work[start] + (limit * budget.speed - budget.work) * ROUNDING)
        by_room = bisect_right(self.sizes, self.sizes[start] + budget.room - budget.size)
        following = len(self.stages) - 1 - stage
        return min(by_time - 1, by_room - 1, self.layers - following)

    def possible(self, stage: int, start: int, limit: float) -> bool:
        """Return True if the stages from `stage` on can hold the layers from `start` on."""
        at = start
        # Taking all that it can is best for every stage, unless the next stage then begins at a layer too large for it.
        for number in range(stage, len(self.stages)):
            end = self.reach(number, at, limit)
            if end <= at:
                return self._possible_with_any_ends(stage, start, limit)
            at = end
        return at == self.layers

    def _possible_with_any_ends(self, stage: int, start: int, limit: float) -> bool:
        starts = {start}
        for number in range(stage, len(self.stages)):
            starts = {end for at in starts for end in range(at + 1, self.reach(number, at, limit) + 1)}
        return self.layers in starts

    def even(self, limit: float) -> tuple[int, ...]:
        """A partition within `limit` in which each stage takes its fair share of the layers left, as far as it can."""
        counts: list[int] = []
        start = 0
        for number in range(len(self.stages)):
            end = self._fair_end(number, start, limit)
            counts.append(end - start)
            start = end
        return tuple(counts)

    def _fair_end(self, number: int, start: int, limit: float) -> int:
        """The end (exclusive) of stage `number` closest to its fair share of what the stages from it on have to do."""
        budget, following = self.stages[number], self.stages[number:]
        left = self.work[-1] - self.work[start] + sum(stage.work for stage in following)
        fair = left * budget.speed / sum(stage.speed for stage in following) - budget.work
        wanted = bisect_right(self.work, self.work[start] + fair * ROUNDING) - 1
        ends = range(start + 1, self.reach(number, start, limit) + 1)
        # Rather too many layers than too few, which would leave more to the later stages.
        by_distance = sorted(ends, key=lambda end: (abs(end - wanted), -end))
        return next(end for end in by_distance if self._possible_after(number, end, limit))

    def _possible_after(self, number: int, end: int, limit: float) -> bool:
        """Return True if the stages after stage `number` can hold the layers from `end` on."""
        return end == self.layers if number == len(self.stages) - 1 else self.possible(number + 1, end, limit)
