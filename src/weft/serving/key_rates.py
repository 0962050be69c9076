"""Rates: requests and tokens per minute, and requests at once, that each key may have."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.serving.errors import HttpError
from weft.serving.key_file import ClientKey

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.strategies import RateLimiter

MORE_THAN_A_MINUTE = "over-rate-limit"  # code of the error for a request that the limit never has room for


class KeyRates:
    """The limits `rpm`, `tpm` and `concurrent` of keys, by their names.

    Minutes slide; the counts are in memory and begin anew with the process.
    """

    def __init__(self, keys: Sequence[ClientKey]) -> None:
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

    def test(self, name: str, *, requests: int = 0, tokens: int = 0) -> None:
        """Raise HttpError 429 if a limit has no room. One that is forbidden must not count for another limit."""
        key = self._keys.get(name)
        if key is None:
            return
        if requests and key.concurrent and self._running[name] >= key.concurrent:
            raise HttpError(
                429,
                f"the key {name!r} has {key.concurrent} requests running, the most that it may have",
                code="too-many-at-once",
                retry_after_s=1,
            )
        for unit, cost in (("tokens", tokens), ("requests", requests)):
            if cost:
                self._test(name, unit, cost)

    def enter(self, name: str, *, tokens: int = 0) -> None:
        """Count a request that begins, and tokens of its prompt as far as they are known."""
        if name in self._keys:
            self._hit(name, "requests", 1)
            self._running[name] += 1
            self.count_prompt(name, tokens)

    def leave(self, name: str) -> None:
        """Note the end of a request that `enter` counted."""
        if name in self._keys:
            self._running[name] -= 1

    def count_prompt(self, name: str, tokens: int) -> None:
        """Count tokens that `test` found room for."""
        if tokens:
            self._hit(name, "tokens", tokens)

    def count_answer(self, name: str, tokens: int) -> None:
        """Count tokens that nothing can forbid any more, as far as the minute has room for them."""
        item = self._items.get((name, "tokens"))
        if item is not None and self._limiter is not None and tokens > 0:
            left = self._limiter.get_window_stats(item, name, "tokens").remaining
            if left > 0:
                self._hit(name, "tokens", min(tokens, left))

    def limits(self, name: str) -> bool:
        """Return True if a key has one of the limits."""
        return name in self._keys

    def counts_tokens(self, name: str) -> bool:
        """Return True if a key has a limit of tokens."""
        return (name, "tokens") in self._items

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
                code=MORE_THAN_A_MINUTE,
            )
        if not limiter.test(item, name, unit, cost=cost):
            reset = limiter.get_window_stats(item, name, unit).reset_time
            raise HttpError(
                429,
                f"the key {name!r} may send {item.amount} {unit} a minute; try again later",
                code="rate-limit",
                retry_after_s=max(1, math.ceil(reset - time.time())),
            )
