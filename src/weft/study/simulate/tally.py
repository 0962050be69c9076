"""Tally: the measurements of a simulation run."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from math import ceil, exp, log

BINS_PER_E = 200  # histogram bins per e-fold of the gap between tokens: each is half a percent wide


class SimulatedTimes:
    """Times of one request, in seconds of the virtual clock."""

    __slots__ = ("arrival_s", "began_s", "first_s", "id", "input_len", "last_s", "measured", "output_len")

    def __init__(self, id: str, arrival_s: float, input_len: int, output_len: int, measured: bool) -> None:
        self.id, self.arrival_s, self.measured = id, arrival_s, measured
        self.input_len, self.output_len = input_len, output_len  # tokens; the output's once the request has ended
        self.began_s: float | None = None  # first step
        self.first_s: float | None = None  # first token
        self.last_s: float | None = None  # latest token


class Tally:
    """Measurements in the window from `begin_s` to `end_s`. Requests are measured if they arrive in the window."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        # One entry for each measured request that was completed.
        self.arrivals = array("d")
        self.queued = array("d")
        self.ttft = array("d")
        self.e2e = array("d")
        self.output_len = array("q")
        self.refused = array("d")  # arrival times of measured requests that a full queue refused
        self.too_long = 0  # measured requests that no replica can hold
        self.ended = 0  # requests that ended in the window
        self.input_tokens = 0
        self.output_tokens = 0.0
        # Summed over replicas: seconds times blocks held, seconds times running requests, and busy seconds.
        self.block_s = self.request_s = self.busy_s = 0.0
        self._gaps: Counter[int] = Counter()
        self.gap_count = 0
        self.gap_sum = 0.0

    def inside(self, now: float) -> bool:
        """Return True if `now` is in the window."""
        return self.begin_s <= now < self.end_s

    def count_completed(self, times: SimulatedTimes) -> None:
        """Count a completed request."""
        assert times.began_s is not None and times.first_s is not None and times.last_s is not None
        self.ended += self.inside(times.last_s)
        if times.measured:
            self.arrivals.append(times.arrival_s)
            self.queued.append(times.began_s - times.arrival_s)
            self.ttft.append(times.first_s - times.arrival_s)
            self.e2e.append(times.last_s - times.arrival_s)
            self.output_len.append(times.output_len)

    def count_refused(self, now: float, *, too_long: bool) -> None:
        """Count a measured request that was refused: by a full queue, or as `too_long` for any replica."""
        if too_long:
            self.too_long += 1
        else:
            self.refused.append(now)

    def count_prompt(self, now: float, times: SimulatedTimes) -> None:
        """Count the tokens of a prompt whose first output token has come."""
        if self.inside(now):
            self.input_tokens += times.input_len

    def count_tokens(self, now: float, tokens: int) -> None:
        """Count output tokens."""
        if self.inside(now):
            self.output_tokens += tokens

    def count_tokens_evenly(self, since: float, now: float, tokens: int) -> None:
        """Count output tokens that came evenly over a time, part of which may lie in the window."""
        self.output_tokens += tokens * self._overlap(since, now) / (now - since)

    def count_gaps(self, now: float, gaps: Sequence[float]) -> None:
        """Count seconds between tokens that came now and the tokens before them."""
        if gaps and self.inside(now):
            # Most rows of a step had their last token at the same time.
            for seconds, count in Counter(gaps).items():
                self._count_gap(seconds, count)

    def count_stretch(self, now: float, rounds: int, requests: int, first_s: float, growth_s: float) -> None:
        """Count the gaps of a stretch (`study.simulate.replica.Stretch`) that ends in the window.

        Each request has `rounds` gaps, each `growth_s` longer than the one before."""
        if not self.inside(now):
            return
        last_s = first_s + growth_s * (rounds - 1)
        # At least as many parts as there are bins between the first gap and the last.
        parts = min(rounds, 1 + ceil(abs(log(last_s / first_s)) * BINS_PER_E))
        for part in range(parts):
            begin, end = part * rounds // parts, (part + 1) * rounds // parts
            self._count_gap(first_s + growth_s * (begin + end - 1) / 2, requests * (end - begin))

    def count_use(self, since: float, now: float, blocks: float, requests: int, *, busy: bool) -> None:
        """Count the blocks and requests that a replica has held for a time."""
        seconds = self._overlap(since, now)
        self.block_s += seconds * blocks
        self.request_s += seconds * requests
        self.busy_s += seconds * busy

    def gap_percentile(self, percent: float) -> float:
        """Percentile of the gaps between tokens, to about half a percent. There must be at least one gap."""
        left, at = self.gap_count * percent / 100, min(self._gaps)
        for at in sorted(self._gaps):
            left -= self._gaps[at]
            if left <= 0:
                break
        return exp(at / BINS_PER_E)

    def _count_gap(self, seconds: float, count: int) -> None:
        self._gaps[round(log(seconds) * BINS_PER_E)] += count
        self.gap_count += count
        self.gap_sum += seconds * count

    def _overlap(self, since: float, now: float) -> float:
        """Seconds of the time that lie in the window."""
        return max(0.0, min(now, self.end_s) - max(since, self.begin_s))
