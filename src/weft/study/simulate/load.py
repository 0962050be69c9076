"""Simulated loads: the requests and their arrival times. Seeded: the same load gives the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf, sqrt
from random import Random
from statistics import fmean, pstdev
from typing import Protocol

import msgspec

from weft.study.simulate.lengths import Lengths
from weft.study.simulate.simulated_request import ContentIds, SimulatedRequest
from weft.study.simulate.trace import TraceRow

RETRY_S = 1.0  # time after which a refused user asks again, as QueueFullError.retry_after_s


class RequestSource(Protocol):
    """The requests of one simulation run. `next_s`: arrival time of the next one, infinity if there is none."""

    next_s: float

    def take_request(self) -> SimulatedRequest:
        """Take the request that arrives at `next_s`."""
        ...

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        """Report that a taken request has been completed or refused."""
        ...


class RequestDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of requests' lengths, in tokens.

    Lengths come from two distributions, or from `rows` of a trace, which give both lengths together. Each prompt begins
    with one prefix of `prefixes` shared prefixes of `prefix_len` tokens. Prompt and output together are cut to `most`
    tokens.
    """

    input_len: Lengths
    output_len: Lengths
    rows: tuple[TraceRow, ...] = ()
    prefixes: int = 1
    prefix_len: int = 0
    most: int

    def requests(self, seed: int) -> RequestSampler:
        """Create a sampler of requests."""
        return RequestSampler(self, seed)

    @property
    def mean(self) -> tuple[float, float]:
        """Mean number of tokens of a prompt and of an output."""
        if self.rows:
            return mean_lengths(self.rows)
        input_len, _ = self.input_len.moments(self.most - 1)
        return input_len, self.output_len.moments(self._longest_output)[0]

    @property
    def output_spread(self) -> float:
        """Coefficient of variation of the output lengths: standard deviation over mean."""
        if self.rows:
            return output_spread(self.rows)
        mean, square = self.output_len.moments(self._longest_output)
        return sqrt(max(0.0, square / mean**2 - 1))

    @property
    def _longest_output(self) -> int:
        """Number of tokens that a prompt of mean length leaves for the output."""
        return max(1, self.most - round(self.input_len.moments(self.most - 1)[0]))


class RequestSampler:
    """Draws requests from a distribution."""

    def __init__(self, distribution: RequestDistribution, seed: int) -> None:
        self._distribution = distribution
        self._random, self._contents = Random(f"weft requests {seed}"), ContentIds()

    def draw(self) -> SimulatedRequest:
        """Draw one request."""
        distribution, random = self._distribution, self._random
        if distribution.rows:
            request = random.choice(distribution.rows).request
            input_len, output_len = request.input_len, request.output_len
        else:
            input_len, output_len = distribution.input_len.draw(random), distribution.output_len.draw(random)
        input_len = min(input_len, distribution.most - 1)
        output_len = min(output_len, distribution.most - input_len)
        own = self._contents.new()
        if not distribution.prefix_len:
            return SimulatedRequest(input_len, output_len, own)
        prefix = self._contents.id("prefix", random.randrange(distribution.prefixes))
        return SimulatedRequest(input_len, output_len, own, ((prefix, distribution.prefix_len),))


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests sent to a deployment.

    One of: `rate` requests per second; `users`, each of whom sends the next request `think_s` after an answer; or the
    requests of a `trace`, at their own times or, with a rate, scaled to it.

    At a rate, the gaps between requests have a gamma distribution of the shape `burstiness`: 1 is a Poisson process,
    less gives bursts, more gives even gaps.
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
        """Mean number of tokens of a prompt and of an output."""
        return mean_lengths(self.trace) if self.trace else self.distribution.mean

    @property
    def output_spread(self) -> float:
        """Coefficient of variation of the output lengths: standard deviation over mean."""
        return output_spread(self.trace) if self.trace else self.distribution.output_spread

    @property
    def shares_prefixes(self) -> bool:
        """True if prompts have a common prefix."""
        if not self.trace:
            return self.distribution.prefix_len > 0
        contents = {row.request.own for row in self.trace}
        return len(contents) < len(self.trace) or any(row.request.shared for row in self.trace)

    @property
    def offered(self) -> float | None:
        """Open-loop arrival rate in requests per second; None for users, who wait for their answers."""
        return None if self.users else self.rate or trace_rate(self.trace)

    def source(self) -> RequestSource:
        """Create the request source of one run."""
        if self.users:
            return ClosedLoop(self, self.users)
        return TraceReplay(self) if self.trace else OpenLoop(self)


class OpenLoop:
    """Open-loop source: requests arrive at a rate, regardless of completions."""

    def __init__(self, load: SimulatedLoad) -> None:
        assert load.rate is not None
        self._random = Random(f"weft arrivals {load.seed}")
        self._sampler = load.distribution.requests(load.seed)
        self._shape, self._scale = load.burstiness, 1 / (load.rate * load.burstiness)
        self.next_s = self._gap()

    def take_request(self) -> SimulatedRequest:
        self.next_s += self._gap()
        return self._sampler.draw()

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        """Do nothing: completions do not affect arrivals."""

    def _gap(self) -> float:
        return self._random.gammavariate(self._shape, self._scale)


class TraceReplay:
    """Open-loop source that replays a trace."""

    def __init__(self, load: SimulatedLoad) -> None:
        self._speed = load.rate / trace_rate(load.trace) if load.rate else 1.0
        self._rows = iter(load.trace)
        self._row: TraceRow | None = None
        self._advance()

    def take_request(self) -> SimulatedRequest:
        assert self._row is not None
        request = self._row.request
        self._advance()
        return request

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        """Do nothing: completions do not affect arrivals."""

    def _advance(self) -> None:
        self._row = next(self._rows, None)
        self.next_s = self._row.at / self._speed if self._row else inf


class ClosedLoop:
    """Closed-loop source: each user sends a request, waits for the answer, thinks, and sends the next one."""

    def __init__(self, load: SimulatedLoad, users: int) -> None:
        self._think_s, self._sampler = load.think_s, load.distribution.requests(load.seed)
        self._random = Random(f"weft arrivals {load.seed}")
        # The run begins in the middle of every user's first answer, else all users would stay in step.
        self._begun = 0
        self._users = users
        self._times = [self._random.uniform(0, load.think_s) for _ in range(users)]
        heapify(self._times)
        self.next_s = self._times[0]

    def take_request(self) -> SimulatedRequest:
        heappop(self._times)
        self._update_next()
        request = self._sampler.draw()
        if self._begun == self._users:
            return request
        self._begun += 1
        return request._replace(output_len=self._random.randint(1, request.output_len))

    def request_ended(self, now: float, *, refused: bool = False) -> None:
        heappush(self._times, now + (RETRY_S if refused else self._think_s))
        self._update_next()

    def _update_next(self) -> None:
        self.next_s = self._times[0] if self._times else inf


def mean_lengths(rows: Sequence[TraceRow]) -> tuple[float, float]:
    """Mean number of tokens of a trace's prompts and outputs."""
    return fmean(row.request.input_len for row in rows), fmean(row.request.output_len for row in rows)


def output_spread(rows: Sequence[TraceRow]) -> float:
    """Coefficient of variation of a trace's output lengths: standard deviation over mean."""
    lengths = [row.request.output_len for row in rows]
    return pstdev(lengths) / fmean(lengths)


def trace_rate(rows: Sequence[TraceRow]) -> float:
    """Requests per second of a trace."""
    return (len(rows) - 1) / rows[-1].at if len(rows) > 1 and rows[-1].at > 0 else inf
