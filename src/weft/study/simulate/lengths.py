"""Distributions of prompt and output lengths, in tokens.

`moments(most)`: mean and mean square of the drawn lengths, with lengths above `most` cut to it.
"""

from __future__ import annotations

from math import erfc, exp, log, sqrt
from random import Random

import msgspec

from weft.errors import ConfigError

MAX_TOKENS = 100_000_000  # largest mean or deviation: beyond every model, yet small enough to compute with


class FixedLength(msgspec.Struct, frozen=True):
    """Always `tokens` tokens."""

    tokens: int

    @property
    def mean(self) -> float:
        return self.tokens

    @property
    def longest(self) -> int | None:
        return self.tokens

    def moments(self, most: int) -> tuple[float, float]:
        return self.tokens, self.tokens**2

    def draw(self, random: Random) -> int:
        return self.tokens


class UniformLength(msgspec.Struct, frozen=True):
    """Uniform distribution from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def longest(self) -> int | None:
        return self.high

    def moments(self, most: int) -> tuple[float, float]:
        count = self.high - self.low + 1
        return self.mean, self.mean**2 + (count**2 - 1) / 12

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)


class LogNormalLength(msgspec.Struct, frozen=True):
    """Log-normal distribution with this mean and standard deviation, in tokens: many short and a few long lengths."""

    mean: float
    deviation: float

    @property
    def longest(self) -> int | None:
        """None: the distribution has no upper end."""
        return None

    def moments(self, most: int) -> tuple[float, float]:
        """Partial moments of the log-normal distribution up to `most`, and `most` for the part above it."""
        mu, sigma = self._logarithm
        if not sigma:
            return min(self.mean, most), min(self.mean, most) ** 2
        at = (log(most) - mu) / sigma
        first, second = (
            exp(n * mu + (n * sigma) ** 2 / 2) * _normal(at - n * sigma) + most**n * _normal(-at) for n in (1, 2)
        )
        return first, second

    def draw(self, random: Random) -> int:
        return max(1, round(exp(random.gauss(*self._logarithm))))

    @property
    def _logarithm(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm, which is normal."""
        variance = log(1 + (self.deviation / self.mean) ** 2)
        return log(self.mean) - variance / 2, sqrt(variance)


def _normal(at: float) -> float:
    """Cumulative distribution function of the normal distribution."""
    return erfc(-at / sqrt(2)) / 2


Lengths = FixedLength | UniformLength | LogNormalLength


def parse_lengths(text: str, flag: str) -> Lengths:
    """Parse `1024`, `100:1024` or `lognormal:MEAN:DEVIATION`. Raises ConfigError with the flag's name."""
    kind, *parameters = text.split(":")
    try:
        if kind == "lognormal":
            mean, deviation = map(float, parameters)
            return _log_normal(mean, deviation, f"{flag} {text!r}")
        bounds = [int(part) for part in text.split(":")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 2:
        raise ConfigError(
            f"{flag} {text!r} is no length in tokens; write 1024, a range 100:1024, or lognormal:MEAN:DEVIATION",
            code="bad-length",
        )
    if bounds[0] < 1 or bounds[-1] < bounds[0]:
        raise ConfigError(
            f"{flag} {text!r}: lengths are 1 or more, and a range begins with the lower end", code="length-out-of-range"
        )
    return FixedLength(bounds[0]) if len(bounds) == 1 else UniformLength(*bounds)


def _log_normal(mean: float, deviation: float, given: str) -> LogNormalLength:
    if not (1 <= mean <= MAX_TOKENS and 0 <= deviation <= MAX_TOKENS):
        raise ConfigError(
            f"{given}: the mean must be 1 or more, the deviation 0 or more, in tokens, and both {MAX_TOKENS:,} at most",
            code="lognormal-out-of-range",
        )
    return LogNormalLength(mean, deviation)
