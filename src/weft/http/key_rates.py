"""Rates: requests and tokens per minute, and requests at once, that each key may have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from weft.http.errors import HttpError
from weft.http.key_file import ClientKey

if TYPE_CHECKING:
    from limits import RateLimitItem
    from limits.storage import MemoryStorage
    from limits.strategies import SlidingWindowCounterRateLimiter

MORE_THAN_A_MINUTE = "over-rate-limit"  # code of the error for a request that always exceeds the limit


class RateError(HttpError):
    """A request exceeds a limit now. `tokens`: tokens of its prompt, if they exceed the limit of tokens; else 0."""

    def __init__(self, message: str, *, retry_after_s: int, tokens: int = 0) -> None:
        super().__init__(429, message, code="rate-limit", retry_after_s=retry_after_s)
        self.tokens = tokens


class KeyRates:
    """The limits `rpm`, `tpm` and `concurrent` of keys, by their names.

    Minutes slide; the counts are in memory and restart with the process.
    """

    def __init__(self, keys: Sequence[ClientKey]) -> None:
        # For all keys, also without limits: a key may get limits while its requests run.
        self._running: Counter[str] = Counter()
        self._expected: Counter[str] = Counter()  # requests that are yet to be counted, by `RequestCount`
        self._limiter: SlidingWindowCounterRateLimiter | None = None
        self.change(keys)

    def change(self, keys: Sequence[ClientKey]) -> None:
        """Keep the limits of these keys from now on. Counts by the name of a key stay."""
        items = self._create_items(keys) if any(key.rpm or key.tpm for key in keys) else {}
        self._items: dict[tuple[str, str], RateLimitItem] = items
        self._keys = {key.name: key for key in keys if key.rpm or key.tpm or key.concurrent}

    def _create_items(self, keys: Sequence[ClientKey]) -> dict[tuple[str, str], RateLimitItem]:
        """The limits per minute."""
        from limits import RateLimitItemPerMinute
        from limits.storage import MemoryStorage
        from limits.strategies import SlidingWindowCounterRateLimiter

        if self._limiter is None:
            self._storage: MemoryStorage = MemoryStorage()
            self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        units = [
            ((key.name, unit), most) for key in keys for unit, most in (("requests", key.rpm), ("tokens", key.tpm))
        ]
        return {name: RateLimitItemPerMinute(most) for name, most in units if most}

    def test(self, name: str, *, requests: int = 0, tokens: int = 0) -> None:
        """Raise HttpError 429 if a limit is reached. A refused request must not count for another limit."""
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
        if tokens:
            self._test(name, "tokens", tokens)
        if requests:
            self._test(name, "requests", requests, self._expected[name])

    def enter(self, name: str, *, tokens: int = 0) -> None:
        """Count a request that begins, and tokens of its prompt as far as they are known."""
        self._hit(name, "requests", 1)
        self._running[name] += 1
        self.count_prompt(name, tokens)

    def expect(self, name: str) -> None:
        """Note a request that begins and that `test` admitted; it is counted later."""
        self._expected[name] += 1
        self._running[name] += 1

    def settle(self, name: str, *, counted: bool) -> None:
        """Count a request that was expected, or forget it if it was refused. It runs on until `leave`."""
        self._expected[name] -= 1
        if counted:
            self._hit(name, "requests", 1)

    def leave(self, name: str) -> None:
        """Note the end of a request that began with `enter` or `expect`."""
        self._running[name] -= 1

    def count_prompt(self, name: str, tokens: int) -> None:
        """Count tokens that `test` admitted."""
        if tokens:
            self._hit(name, "tokens", tokens)

    def count_answer(self, name: str, tokens: int) -> None:
        """Count tokens of an admitted request, at most up to the limit of the minute."""
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

    def _test(self, name: str, unit: str, cost: int, expected: int = 0) -> None:
        """Raise HttpError 429 if a limit does not allow `cost` in addition to `expected`."""
        item, limiter = self._items.get((name, unit)), self._limiter
        if item is None or limiter is None:
            return
        if cost > item.amount:
            raise HttpError(
                429,
                f"about {cost} {unit} in one request; the key {name!r} has {item.amount} a minute",
                code=MORE_THAN_A_MINUTE,
            )
        if not limiter.test(item, name, unit, cost=cost + expected):
            window = self._storage.get_sliding_window(item.key_for(name, unit), item.get_expiry())
            raise RateError(
                f"the key {name!r} may send {item.amount} {unit} a minute; try again later",
                retry_after_s=seconds_until_room(window, item.get_expiry(), item.amount - cost - expected),
                tokens=cost if unit == "tokens" else 0,
            )


def seconds_until_room(window: tuple[int, float, int, float], expiry: int, most: int) -> int:
    """Whole seconds until a sliding window has counted at most `most`, if nothing is added to it.

    `window` is as `limits` reports it: the count of the last period of `expiry` seconds, the seconds until it no longer
    counts, and the same for the current period. The count of an ended period falls linearly during the next period;
    fractions of a request do not count.
    """
    previous, previous_s, current, current_s = window
    room = max(1, most + 1)
    if current < room:
        seconds = previous_s - (room - current) * expiry / previous if previous else 0.0
    else:
        seconds = current_s - room * expiry / current
    return max(1, math.floor(seconds) + 1)


class RequestCount:
    """The place of one request among the limits of its key.

    It is counted when its prompt is accepted, at the latest when it ends, and not if it is refused. Until then it
    counts as expected.
    """

    def __init__(self, rates: KeyRates, name: str) -> None:
        self._rates, self._name = rates, name
        self._settled = True
        self._paid_tokens = 0  # counted before the request came

    def enter(self) -> None:
        """Begin. Raises HttpError 429 if a limit does not allow the request.

        At least one token: a client without any left is refused before its body is read.
        """
        self._rates.test(self._name, requests=1, tokens=0 if self._paid_tokens else 1)
        self._rates.expect(self._name)
        self._settled = False

    def leave(self) -> None:
        """End."""
        self._settle(counted=True)
        self._rates.leave(self._name)

    def refuse(self) -> None:
        """Note that the request is refused: it does not count."""
        self._settle(counted=False)

    @contextmanager
    def accepting(self, tokens: int) -> Iterator[None]:
        """Count the request and the tokens of its prompt if the block accepts it: if that raises nothing.

        Raises HttpError 429 before the block if a limit does not allow them.
        """
        left = max(0, tokens - self._paid_tokens)
        try:
            self._rates.test(self._name, tokens=left)
            yield
        except BaseException:
            self.refuse()
            raise
        self._paid_tokens -= min(tokens, self._paid_tokens)
        self._rates.count_prompt(self._name, left)
        self._settle(counted=True)

    def count_answer(self, tokens: int) -> None:
        """Count the tokens of an answer."""
        self._rates.count_answer(self._name, tokens)

    def pay_tokens(self, tokens: int) -> bool:
        """Count the tokens of a later prompt, if the limit allows them now; else return False."""
        try:
            self._rates.test(self._name, tokens=tokens)
        except RateError:
            return False
        self._rates.count_prompt(self._name, tokens)
        self._paid_tokens += tokens
        return True

    def _settle(self, *, counted: bool) -> None:
        if not self._settled:
            self._settled = True
            self._rates.settle(self._name, counted=counted)


UNCOUNTED = RequestCount(KeyRates([]), "")
# Count of the request that the present task answers.
counting: ContextVar[RequestCount] = ContextVar("counting", default=UNCOUNTED)
