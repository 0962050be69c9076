"""Steps: the seconds of one step from its ragged batch, by the arithmetic of planner.cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from weft.planner.replica import Replica, Stage
from weft.planner.roofline import Roofline, attended_pairs
from weft.planner.work import AttentionWork, RankWork


class StepSeconds(NamedTuple):
    """`latency_s` is from a step's start to its result, through all stages; `interval_s` the least from the result of the
    step before to its own."""

    latency_s: float
    interval_s: float


# A rank's seconds without attention, and those of each token that attention sees within each of the windows.
Line = tuple[float, tuple[float, ...]]
# How many stages are alike, and the different ranks of one.
Lines = tuple[tuple[int, tuple[Line, ...]], ...]


class StepPredictor:
    """What the steps of one replica take, fast for a caller who asks often.

    A step that decodes and reads prompts takes what the two take one after the other, as `predict` has it, whose
    constants were fitted so: a long run with equal requests comes out as `predict` says. `windows` are those of the
    layers, None where one sees everything; between them a row's seconds grow evenly with its context.
    """

    def __init__(self, replica: Replica) -> None:
        profile = replica.profile
        self._host_s, self._row_s = profile.step_us.value * 1e-6, profile.sequence_us.value * 1e-6
        self._bubble, self._sharing = profile.bubble.value, replica.sharing
        counts = Counter(stage.key for stage in replica.stages)
        self._stages = [(counts[key], stage) for key, stage in {it.key: it for it in replica.stages}.items()]
        self._turns: tuple[int, ...] = tuple(range(len(self._stages)))
        if len(set(replica.turns)) < len(replica.stages):  # of those on one GPU the times add up
            self._stages, self._turns = [(1, stage) for stage in replica.stages], replica.turns
        works = [work for _, stage in self._stages for _, work in stage.ranks]
        self.windows = tuple({layer.attention.window: None for work in works for layer in work.layers})
        self._decoding: dict[int, Lines] = {}
        self._reading: dict[tuple[int, int], Lines] = {}

    def step_s(
        self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]] = (), *, ends: int = 0, groups: int = 1
    ) -> StepSeconds:
        """A step that gives one token to each row with a context of so many tokens, its own position counted, and
        reads `chunks` of prompts, (first position, tokens), of which `ends` end theirs. `groups` is the number of
        steps under way in the stages, this one included."""
        host = self._host_s + self._row_s * len(contexts)
        through = slowest = 0.0
        if contexts:
            through, slowest = _seconds(
                self._decode(len(contexts)), [_seen(contexts, it) for it in self.windows], self._turns
            )
        apart = (slowest + host) * (1 + self._bubble * (groups - 1))
        through += host
        if chunks:
            tokens = sum(count for _, count in chunks)
            seen = [
                sum(attended_pairs(at + count, it) - attended_pairs(at, it) for at, count in chunks)
                for it in self.windows
            ]
            read, longest = _seconds(self._read(tokens, ends), seen, self._turns)
            through, apart = through + read, apart + longest
        return StepSeconds(through, apart)

    def _decode(self, rows: int) -> Lines:
        def seconds(rank: Roofline, work: RankWork, routed: float, dealt: bool) -> float:
            return rank.decode_s(work, rows, 0, routed, dealt).total

        if rows not in self._decoding:
            self._decoding[rows] = self._lines(rows, rows, seconds, Roofline.cached_token_s)
        return self._decoding[rows]

    def _read(self, tokens: int, ends: int) -> Lines:
        def seconds(rank: Roofline, work: RankWork, routed: float, dealt: bool) -> float:
            launches = sum(layer.count * rank.prefill_attention_s(layer.attention, 0) for layer in work.layers)
            head = rank.product_s(work.head, ends) if work.head and ends else 0.0
            return rank.layers_s(work, tokens, routed, dealt).total + launches + head

        if (tokens, ends) not in self._reading:
            self._reading[tokens, ends] = self._lines(tokens, ends, seconds, Roofline.pair_s)
        return self._reading[tokens, ends]

    def _lines(
        self,
        tokens: int,
        logits: int,
        seconds: Callable[[Roofline, RankWork, float, bool], float],
        seen_s: Callable[[Roofline, AttentionWork], float],
    ) -> Lines:
        def line(stage: Stage, rank: Roofline, work: RankWork) -> Line:
            slopes: dict[int | None, float] = defaultdict(float)
            for layer in work.layers:
                slopes[layer.attention.window] += layer.count * seen_s(rank, layer.attention)
            took = seconds(rank, work, routed, stage.dealt(work))
            # All ranks of a stage wait for the same sums.
            took += stage.links_s(stage.ranks[0][1], tokens, routed, logits)
            return took, tuple(slopes[window] for window in self.windows)

        routed = tokens * self._sharing
        return tuple((count, tuple(line(stage, *it) for it in stage.ranks)) for count, stage in self._stages)


def _seen(contexts: Sequence[int], window: int | None) -> int:
    return sum(contexts) if window is None else sum(min(context, window) for context in contexts)


def _seconds(lines: Lines, seen: Sequence[float], turns: Sequence[int]) -> tuple[float, float]:
    """Of all stages together, and of the slowest; stages that take turns count as one there."""
    total = 0.0
    each = [0.0] * len(lines)
    for (count, ranks), turn in zip(lines, turns, strict=True):
        took = max(fixed + sum(map(mul, slopes, seen)) for fixed, slopes in ranks)
        total += count * took
        each[turn] += took
    return total, max(each)
