"""StepPredictor: seconds of single steps of a ragged batch, from the same formulas as planner.cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from weft.planner.work.replica import PlannedReplica, Stage
from weft.planner.work.roofline import Roofline, attended_pairs
from weft.planner.work.work import AttentionWork, LayerWork, RankWork


class StepSeconds(NamedTuple):
    """`latency_s` is the time from a step's start to its result, through all stages. `interval_s` is the least time
    between the result of the step before and its own."""

    latency_s: float
    interval_s: float


# A rank's seconds without attention, and its seconds per token that attention sees within each of the windows.
Line = tuple[float, tuple[float, ...]]
# (number of equal stages, the different ranks of one stage).
Lines = tuple[tuple[int, tuple[Line, ...]], ...]


class StepPredictor:
    """Seconds of the steps of one replica, fast for many calls.

    A step that decodes and reads prompts takes as long as the two one after the other. `predict` assumes the same, and
    its constants were fitted so: a long run with equal requests comes out as `predict` says. `windows` are the layers'
    windows, None for full attention. For a given window the seconds of a row grow linearly with its context.
    """

    def __init__(self, replica: PlannedReplica) -> None:
        profile = replica.profile
        self._host_s, self._row_s = profile.step_us.value * 1e-6, profile.sequence_us.value * 1e-6
        self._control_s = replica.control_s
        self._bubble, self._sharing = profile.bubble.value, replica.sharing
        if len(set(replica.turns)) < len(replica.stages):  # the times of stages that share a GPU add up
            self._stages = [(1, stage) for stage in replica.stages]
            self._turns = replica.turns
        else:
            counts = Counter(stage.key for stage in replica.stages)
            distinct = {stage.key: stage for stage in replica.stages}
            self._stages = [(counts[key], stage) for key, stage in distinct.items()]
            self._turns = tuple(range(len(self._stages)))
        self.windows = tuple({layer.attention.window: None for layer in _all_layers(self._stages)})
        self._decoding: dict[tuple[int, float], Lines] = {}
        self._reading: dict[tuple[int, int, float], Lines] = {}

    def step_s(
        self,
        contexts: Sequence[int],
        chunks: Sequence[tuple[int, int]] = (),
        *,
        ends: int = 0,
        groups: int = 1,
        routed: tuple[int, int] | None = None,
    ) -> StepSeconds:
        """Seconds of a step that decodes one token per row and reads chunks of prompts.

        `contexts` are the rows' context lengths, the new token's own position included. `chunks` are
        (first position, tokens); `ends` of them end their prompt. `groups` is the number of steps in flight in the
        stages, this one included. `routed` are the (decoded tokens, tokens of prompts) of all attention groups in the
        step; None if each of them has as many as this one.
        """
        tokens = sum(count for _, count in chunks)
        decoded, read = routed or (len(contexts) * self._sharing, tokens * self._sharing)
        host = self._host_s + self._row_s * len(contexts)
        latency = slowest = 0.0
        if decoded:
            seen = [_attended_tokens(contexts, window) for window in self.windows]
            latency, slowest = _seconds(self._decode(len(contexts), decoded), seen, self._turns)
        interval = (slowest + host) * (1 + self._bubble * (groups - 1))
        latency += host + self._control_s
        if read:
            pairs = [_chunk_pairs(chunks, window) for window in self.windows]
            reading, longest = _seconds(self._prefill(tokens, ends, read), pairs, self._turns)
            latency, interval = latency + reading, interval + longest
        return StepSeconds(latency, interval)

    def _decode(self, rows: int, routed: float) -> Lines:
        def seconds(rank: Roofline, work: RankWork, routed: float, dealt: bool) -> float:
            return rank.decode_s(work, rows, 0, routed, dealt).total

        if (rows, routed) not in self._decoding:
            self._decoding[rows, routed] = self._lines(rows, rows, routed, seconds, Roofline.cached_token_s)
        return self._decoding[rows, routed]

    def _prefill(self, tokens: int, ends: int, routed: float) -> Lines:
        def seconds(rank: Roofline, work: RankWork, routed: float, dealt: bool) -> float:
            launches = sum(layer.count * rank.prefill_attention_s(layer.attention, 0) for layer in work.layers)
            head = rank.product_s(work.head, ends) if work.head and ends else 0.0
            return rank.layers_s(work, tokens, routed, dealt).total + launches + head

        if (tokens, ends, routed) not in self._reading:
            self._reading[tokens, ends, routed] = self._lines(tokens, ends, routed, seconds, Roofline.pair_s)
        return self._reading[tokens, ends, routed]

    def _lines(
        self,
        tokens: int,
        logits: int,
        routed: float,
        seconds: Callable[[Roofline, RankWork, float, bool], float],
        seen_s: Callable[[Roofline, AttentionWork], float],
    ) -> Lines:
        """The line of every different rank, in steps of `tokens` tokens and `logits` rows of logits.

        `routed` tokens of all attention groups reach the experts.
        """

        def line(stage: Stage, rank: Roofline, work: RankWork) -> Line:
            if not tokens:  # the experts work for other groups
                took = rank.experts_alone_s(work, routed, stage.experts_dealt(work))
                return took + stage.exchange_s(work, 0, routed), (0.0,) * len(self.windows)
            slopes: dict[int | None, float] = defaultdict(float)
            for layer in work.layers:
                slopes[layer.attention.window] += layer.count * seen_s(rank, layer.attention)
            took = seconds(rank, work, routed, stage.experts_dealt(work))
            # All ranks of a stage wait for the same all-reduces.
            took += stage.links_s(stage.ranks[0][1], tokens, routed, logits)
            return took, tuple(slopes[window] for window in self.windows)

        return tuple((count, tuple(line(stage, *rank) for rank in stage.ranks)) for count, stage in self._stages)


def _all_layers(stages: Sequence[tuple[int, Stage]]) -> list[LayerWork]:
    return [layer for _, stage in stages for _, work in stage.ranks for layer in work.layers]


def _attended_tokens(contexts: Sequence[int], window: int | None) -> int:
    return sum(contexts) if window is None else sum(min(context, window) for context in contexts)


def _chunk_pairs(chunks: Sequence[tuple[int, int]], window: int | None) -> float:
    return sum(attended_pairs(at + count, window) - attended_pairs(at, window) for at, count in chunks)


def _seconds(lines: Lines, seen: Sequence[float], turns: Sequence[int]) -> tuple[float, float]:
    """(all stages together, the slowest one); stages that take turns on a GPU count as a single one for the second."""
    total = 0.0
    each = [0.0] * len(lines)
    for (count, ranks), turn in zip(lines, turns, strict=True):
        took = max([fixed + sum(map(mul, slopes, seen)) for fixed, slopes in ranks])
        total += count * took
        each[turn] += took
    return total, max(each)
