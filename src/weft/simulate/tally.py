"""Tally: what is put down while a simulation runs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from math import ceil, exp, log

FINE = 200  # bins of gaps between tokens for a factor of e: half a percent each


class RequestTimes:
    """One request's times, in seconds of the virtual clock."""

    __slots__ = ("asked_s", "began_s", "first_s", "id", "input_len", "last_s", "measured", "output_len")

    def __init__(self, id: str, asked_s: float, input_len: int, output_len: int, measured: bool) -> None:
        self.id, self.asked_s, self.measured = id, asked_s, measured
        self.input_len, self.output_len = input_len, output_len  # the tokens that it has when it has ended
        self.began_s: float | None = None  # when it first took part in a step
        self.first_s: float | None = None
        self.last_s: float | None = None


class Tally:
    """What happens in the window from `begin_s` to `end_s`. Of requests, those that come in it are measured."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        # Of each measured request that was answered.
        self.asked = array("d")
        self.queued = array("d")
        self.ttft = array("d")
        self.e2e = array("d")
        self.output_len = array("q")
        self.refused = array("d")  # when each measured one came that the queue had no place for
        self.too_long = 0  # measured ones that no replica can hold
        self.ended = 0  # answers that ended in the window
        self.input_tokens = 0
        self.output_tokens = 0.0
        # Replica-seconds times what was in use.
        self.block_s = self.request_s = self.busy_s = 0.0
        self._gaps: Counter[int] = Counter()
        self.gap_count = 0
        self.gap_sum = 0.0

    def inside(self, now: float) -> bool:
        return self.begin_s <= now < self.end_s

    def answered(self, answer: RequestTimes) -> None:
        """A request has ended."""
        assert answer.began_s is not None and answer.first_s is not None and answer.last_s is not None
        self.ended += self.inside(answer.last_s)
        if answer.measured:
            self.asked.append(answer.asked_s)
            self.queued.append(answer.began_s - answer.asked_s)
            self.ttft.append(answer.first_s - answer.asked_s)
            self.e2e.append(answer.last_s - answer.asked_s)
            self.output_len.append(answer.output_len)

    def refuse(self, now: float, *, impossible: bool) -> None:
        """A measured request was refused: by a full queue, or for ever."""
        if impossible:
            self.too_long += 1
        else:
            self.refused.append(now)

    def read(self, now: float, answer: RequestTimes) -> None:
        """A prompt has its first token."""
        if self.inside(now):
            self.input_tokens += answer.input_len

    def wrote(self, now: float, tokens: int) -> None:
        """So many tokens of answers are there."""
        if self.inside(now):
            self.output_tokens += tokens

    def wrote_evenly(self, since: float, now: float, tokens: int) -> None:
        """So many tokens came over a time, part of which may lie in the window."""
        self.output_tokens += tokens * self._overlap(since, now) / (now - since)

    def count_gaps(self, now: float, gaps: Sequence[float]) -> None:
        """Seconds between tokens of answers that came now and those before."""
        if gaps and self.inside(now):
            # Most rows of a step had their last token at the same time.
            for seconds, count in Counter(gaps).items():
                self._gap(seconds, count)

    def count_stretch(self, now: float, rounds: int, requests: int, first_s: float, growth_s: float) -> None:
        """The gaps of a stretch that is over: `rounds` of them for each request, each longer than the one before."""
        if not self.inside(now):
            return
        last_s = first_s + growth_s * (rounds - 1)
        # In as many parts as there are bins between the first and the last.
        parts = min(rounds, 1 + ceil(abs(log(last_s / first_s)) * FINE))
        for part in range(parts):
            begin, end = part * rounds // parts, (part + 1) * rounds // parts
            self._gap(first_s + growth_s * (begin + end - 1) / 2, requests * (end - begin))

    def used(self, since: float, now: float, blocks: float, requests: int, *, busy: bool) -> None:
        """A replica has had so many blocks and requests for a time."""
        seconds = self._overlap(since, now)
        self.block_s += seconds * blocks
        self.request_s += seconds * requests
        self.busy_s += seconds * busy

    def gap_percentile(self, percent: float) -> float:
        """Of all gaps, to a quarter of a percent. There must be one."""
        left, at = self.gap_count * percent / 100, min(self._gaps)
        for at in sorted(self._gaps):
            left -= self._gaps[at]
            if left <= 0:
                break
        return exp(at / FINE)

    def _gap(self, seconds: float, count: int) -> None:
        self._gaps[round(log(seconds) * FINE)] += count
        self.gap_count += count
        self.gap_sum += seconds * count

    def _overlap(self, since: float, now: float) -> float:
        return max(0.0, min(now, self.end_s) - max(since, self.begin_s))
