"""Load: which requests come, and when. Seeded: the same load brings the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf, sqrt
from random import Random
from statistics import fmean, pstdev
from typing import Protocol

import msgspec

from weft.simulate.lengths import Lengths
from weft.simulate.simulated_request import ContentIds, SimulatedRequest
from weft.simulate.trace import TraceRow

RETRY_S = 1.0  # QueueFullError.retry_after_s: when a user who was refused asks again


class RequestSource(Protocol):
    """The requests of one run. `next_s` is when the next one comes, infinity where none does."""

    next_s: float

    def take_request(self) -> SimulatedRequest:
        """The request of `next_s`."""
        ...

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        """One that was taken has been answered, or refused."""
        ...


class RequestDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose lengths are drawn: from two distributions, or both together from the rows of a trace. Each prompt
    begins with one of `prefixes` shared beginnings of `prefix_len` tokens. `most` is what prompt and answer may have
    together: what is longer is cut to it."""

    input_len: Lengths
    output_len: Lengths
    rows: tuple[TraceRow, ...] = ()
    prefixes: int = 1
    prefix_len: int = 0
    most: int

    def requests(self, seed: int) -> RequestSampler:
        return RequestSampler(self, seed)

    @property
    def mean(self) -> tuple[float, float]:
        """Tokens of a prompt and of an answer."""
        if self.rows:
            return means(self.rows)
        input_len, _ = self.input_len.moments(self.most - 1)
        return input_len, self.output_len.moments(self._left)[0]

    @property
    def output_spread(self) -> float:
        """Of answers, the standard deviation of their lengths over the mean."""
        if self.rows:
            return output_spread(self.rows)
        mean, square = self.output_len.moments(self._left)
        return sqrt(max(0.0, square / mean**2 - 1))

    @property
    def _left(self) -> int:
        """What a usual prompt leaves to its answer."""
        return max(1, self.most - round(self.input_len.moments(self.most - 1)[0]))


class RequestSampler:
    """Draws one request after the other."""

    def __init__(self, drawn: RequestDistribution, seed: int) -> None:
        self._drawn, self._random, self._contents = drawn, Random(f"weft requests {seed}"), ContentIds()

    def draw(self) -> SimulatedRequest:
        drawn, random = self._drawn, self._random
        if drawn.rows:
            ask = random.choice(drawn.rows).request
            input_len, output_len = ask.input_len, ask.output_len
        else:
            input_len, output_len = drawn.input_len.draw(random), drawn.output_len.draw(random)
        input_len = min(input_len, drawn.most - 1)
        output_len = min(output_len, drawn.most - input_len)
        own = self._contents.new()
        if not drawn.prefix_len:
            return SimulatedRequest(input_len, output_len, own)
        prefix = self._contents.id("prefix", random.randrange(drawn.prefixes))
        return SimulatedRequest(input_len, output_len, own, ((prefix, drawn.prefix_len),))


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a deployment: `rate` requests per second, or `users` who each ask again `think_s` after an
    answer, or the requests of a `trace`, at their own times or, with a rate, faster or slower.

    The gaps between requests at a rate have a gamma distribution of the shape `burstiness`: 1 makes a Poisson process,
    less comes in bursts, more comes evenly.
    """

    distribution: RequestDistribution
    rate: float | None = None
    burstiness: float = 1.0
    users: int | None = None
    think_s: float = 0.0
    trace: tuple[TraceRow, ...] = ()
    seed: int = 0

    @property
    def mean(self) -> tuple[float, float]:
        """Tokens of a prompt and of an answer."""
        return means(self.trace) if self.trace else self.distribution.mean

    @property
    def output_spread(self) -> float:
        """Of answers, the standard deviation of their lengths over the mean."""
        return output_spread(self.trace) if self.trace else self.distribution.output_spread

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts have anything in common."""
        if self.trace:
            return any(row.request.shared for row in self.trace) or len({row.request.own for row in self.trace}) < len(
                self.trace
            )
        return self.distribution.prefix_len > 0

    @property
    def offered(self) -> float | None:
        """Requests per second that come whatever becomes of them; None where users wait for their answers."""
        return None if self.users else self.rate or trace_rate(self.trace)

    def source(self) -> RequestSource:
        """The requests of one run."""
        if self.users:
            return ClosedLoop(self, self.users)
        return TraceReplay(self) if self.trace else OpenLoop(self)


class OpenLoop:
    """Requests that come whatever becomes of them."""

    def __init__(self, load: SimulatedLoad) -> None:
        assert load.rate is not None
        self._random = Random(f"weft arrivals {load.seed}")
        self._drawing = load.distribution.requests(load.seed)
        self._shape, self._scale = load.burstiness, 1 / (load.rate * load.burstiness)
        self.next_s = self._gap()

    def take_request(self) -> SimulatedRequest:
        self.next_s += self._gap()
        return self._drawing.draw()

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        """Is nothing to those who come."""

    def _gap(self) -> float:
        return self._random.gammavariate(self._shape, self._scale)


class TraceReplay:
    """The requests of a trace."""

    def __init__(self, load: SimulatedLoad) -> None:
        self._speed = load.rate / trace_rate(load.trace) if load.rate else 1.0
        self._rows = iter(load.trace)
        self._row: TraceRow | None = None
        self._turn()

    def take_request(self) -> SimulatedRequest:
        assert self._row is not None
        ask = self._row.request
        self._turn()
        return ask

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        """Is nothing to those who come."""

    def _turn(self) -> None:
        self._row = next(self._rows, None)
        self.next_s = self._row.at / self._speed if self._row else inf


class ClosedLoop:
    """Users who ask, wait for the answer, and ask again."""

    def __init__(self, load: SimulatedLoad, users: int) -> None:
        self._think_s, self._drawing = load.think_s, load.distribution.requests(load.seed)
        self._random = Random(f"weft arrivals {load.seed}")
        # Users are in the midst of things when the run begins, else they would go on in step.
        self._begun = 0
        self._users = users
        self._times = [self._random.uniform(0, load.think_s) for _ in range(users)]
        heapify(self._times)
        self.next_s = self._times[0]

    def take_request(self) -> SimulatedRequest:
        heappop(self._times)
        self._turn()
        ask = self._drawing.draw()
        if self._begun == self._users:
            return ask
        self._begun += 1
        return ask._replace(output_len=self._random.randint(1, ask.output_len))

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        heappush(self._times, now + (RETRY_S if refused else self._think_s))
        self._turn()

    def _turn(self) -> None:
        self.next_s = self._times[0] if self._times else inf


def means(rows: Sequence[TraceRow]) -> tuple[float, float]:
    """Tokens of a prompt and of an answer."""
    return fmean(row.request.input_len for row in rows), fmean(row.request.output_len for row in rows)


def output_spread(rows: Sequence[TraceRow]) -> float:
    """As `SimulatedLoad.output_spread`."""
    lengths = [row.request.output_len for row in rows]
    return pstdev(lengths) / fmean(lengths)


def trace_rate(rows: Sequence[TraceRow]) -> float:
    """Requests per second of a trace."""
    return (len(rows) - 1) / rows[-1].at if len(rows) > 1 and rows[-1].at > 0 else inf
