"""Partition: how many layers each stage of a pipeline takes when its GPUs differ, or its layers do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import msgspec


class StageBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage can do and hold: `speed` in work per second, `room` in bytes; `work` and `size` are what it
    has to do and to hold besides its layers (the embedding, the head)."""

    speed: float
    room: float
    work: float = 0.0
    size: float = 0.0


def partition_layers(
    work: Sequence[float], sizes: Sequence[float], stages: Sequence[StageBudget]
) -> tuple[int, ...] | None:
    """Layers per stage, in order, so that the slowest stage is as fast as can be and each stage has the room.

    `work[l]` is what layer l costs, `sizes[l]` its bytes. Among the partitions with the fastest slowest stage it
    is one whose stages end as evenly as they can. None where no partition has the room, or there are fewer
    layers than stages.
    """
    search = _Search(work, sizes, stages)
    if not search.possible(0, 0, inf):
        return None
    # The time of the slowest stage lies between all of it at all speeds together, and all of it on the slowest.
    total = search.work[-1] + sum(stage.work for stage in stages)
    low, high = total / sum(stage.speed for stage in stages), total / min(stage.speed for stage in stages)
    for _ in range(32):  # to one part in 10**9
        middle = (low + high) / 2
        low, high = (low, middle) if search.possible(0, 0, middle) else (middle, high)
    return search.even(high)


class _Search:
    """Contiguous runs of layers by their sums: whatever is asked takes a bisection per stage."""

    def __init__(self, work: Sequence[float], sizes: Sequence[float], stages: Sequence[StageBudget]) -> None:
        self.stages = stages
        self.layers = len(work)
        self.work = [0.0, *accumulate(work)]
        self.sizes = [0.0, *accumulate(sizes)]

    def reach(self, stage: int, start: int, limit: float) -> int:
        """The layer before which a stage that starts at `start` has to end, to take at most `limit` seconds."""
        it = self.stages[stage]
        # A bound that layers meet exactly must not fail by rounding.
        by_time = bisect_right(self.work, self.work[start] + (limit * it.speed - it.work) * (1 + 1e-12))
        by_room = bisect_right(self.sizes, self.sizes[start] + it.room - it.size)
        after = len(self.stages) - 1 - stage
        return min(by_time - 1, by_room - 1, self.layers - after)

    def possible(self, stage: int, start: int, limit: float) -> bool:
        """Whether the stages from `stage` on can hold the layers from `start` on."""
        at = start
        # To take all that it can is best for every stage, unless the next one then begins at a layer too large.
        for number in range(stage, len(self.stages)):
            end = self.reach(number, at, limit)
            if end <= at:
                return self._possible_anyhow(stage, start, limit)
            at = end
        return at == self.layers

    def _possible_anyhow(self, stage: int, start: int, limit: float) -> bool:
        starts = {start}
        for number in range(stage, len(self.stages)):
            starts = {end for at in starts for end in range(at + 1, self.reach(number, at, limit) + 1)}
        return self.layers in starts

    def even(self, limit: float) -> tuple[int, ...]:
        """A partition within `limit` where each stage takes its fair share of what is left, as far as it can."""
        counts: list[int] = []
        start = 0
        for number, it in enumerate(self.stages):
            rest = self.stages[number:]
            left = self.work[-1] - self.work[start] + sum(stage.work for stage in rest)
            fair = left * it.speed / sum(stage.speed for stage in rest) - it.work
            wanted = bisect_right(self.work, self.work[start] + fair * (1 + 1e-12)) - 1
            ends = range(start + 1, self.reach(number, start, limit) + 1)
            # More, rather than less: what is left over falls to the later stages otherwise.
            ordered = sorted((abs(end - wanted), -end) for end in ends)
            end = next(-last for _, last in ordered if self._rest_possible(number, -last, limit))
            counts.append(end - start)
            start = end
        return tuple(counts)

    def _rest_possible(self, number: int, end: int, limit: float) -> bool:
        return end == self.layers if number == len(self.stages) - 1 else self.possible(number + 1, end, limit)
