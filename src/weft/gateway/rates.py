"""Rates: requests and tokens per minute, and requests at once, that each key may have."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.gateway.config import ClientKey
from weft.gateway.shares import Shares
from weft.serving.errors import HttpError

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.strategies import RateLimiter


class Rates:
    """The limits `rpm`, `tpm` and `concurrent` of keys, by their names, and the shares of the gateway's own limit.

    Minutes slide; the counts are in memory and begin anew with the gateway.
    """

    def __init__(self, keys: Sequence[ClientKey], concurrent: int | None = None) -> None:
        weights = {key.name: key.weight for key in keys if key.weight is not None}
        self._shares = None if concurrent is None else Shares(concurrent, weights, time.monotonic)
        self._keys = {key.name: key for key in keys if key.rpm or key.tpm or key.concurrent}
        self._running: Counter[str] = Counter()
        self._limiter: RateLimiter | None = None
        self._items: dict[tuple[str, str], RateLimitItem] = {}
        if any(key.rpm or key.tpm for key in keys):
            self._create_limiter()

    def _create_limiter(self) -> None:
        try:
            from limits import RateLimitItemPerMinute
            from limits.storage import MemoryStorage
            from limits.strategies import SlidingWindowCounterRateLimiter
        except ModuleNotFoundError:
            raise ConfigError(
                'rpm and tpm of keys need the package limits: pip install "weft[gateway]"', code="limits-not-installed"
            ) from None
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        for name, key in self._keys.items():
            for unit, most in (("requests", key.rpm), ("tokens", key.tpm)):
                if most:
                    self._items[name, unit] = RateLimitItemPerMinute(most)

    def enter(self, name: str | None, tokens: int) -> bool:
        """Count a request whose prompt has about `tokens` tokens. Return True if its end must be told to `leave`.

        Raises HttpError 429 if a limit forbids it.
        """
        key = self._keys.get(name or "")
        if key is not None:
            self._test_all(key, tokens)
        if self._shares is not None:
            self._shares.enter(name or "")
        if key is not None:
            for unit, cost in _costs(tokens):
                self._hit(key.name, unit, cost)
            self._running[key.name] += 1
        return key is not None or self._shares is not None

    def _test_all(self, key: ClientKey, tokens: int) -> None:
        """Raise HttpError 429 if a limit forbids a request. One that is forbidden must not count for another limit."""
        name = key.name
        if key.concurrent and self._running[name] >= key.concurrent:
            raise HttpError(
                429,
                f"the key {name!r} has {key.concurrent} requests running, the most that it may have",
                code="too-many-at-once",
                retry_after_s=1,
            )
        for unit, cost in _costs(tokens):
            self._test(name, unit, cost)

    def limits(self, name: str | None) -> bool:
        """Return True if a key has one of the limits."""
        return (name or "") in self._keys

    def counts_tokens(self, name: str | None) -> bool:
        """Return True if a key has a limit of tokens."""
        return (name or "", "tokens") in self._items

    def leave(self, name: str | None, tokens: int) -> None:
        """Note the end of a request that `enter` counted; it took `tokens` more tokens than were counted then."""
        if self._shares is not None:
            self._shares.leave(name or "")
        if name is None or name not in self._keys:
            return
        self._running[name] -= 1
        item = self._items.get((name, "tokens"))
        if item is not None and self._limiter is not None and tokens > 0:
            left = self._limiter.get_window_stats(item, name, "tokens").remaining
            if left > 0:
                self._hit(name, "tokens", min(tokens, left))

    def _hit(self, name: str, unit: str, cost: int) -> None:
        item, limiter = self._items.get((name, unit)), self._limiter
        if item is not None and limiter is not None:
            limiter.hit(item, name, unit, cost=cost)

    def _test(self, name: str, unit: str, cost: int) -> None:
        """Raise HttpError 429 if a limit has no room for `cost`."""
        item, limiter = self._items.get((name, unit)), self._limiter
        if item is None or limiter is None:
            return
        if cost > item.amount:
            raise HttpError(
                429,
                f"about {cost} {unit} in one request; the key {name!r} has {item.amount} a minute",
                code="rate-limit",
            )
        if not limiter.test(item, name, unit, cost=cost):
            reset = limiter.get_window_stats(item, name, unit).reset_time
            raise HttpError(
                429,
                f"the key {name!r} may send {item.amount} {unit} a minute; try again later",
                code="rate-limit",
                retry_after_s=max(1, math.ceil(reset - time.time())),
            )


def _costs(tokens: int) -> tuple[tuple[str, int], ...]:
    return ("tokens", max(tokens, 1)), ("requests", 1)
