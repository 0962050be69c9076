"""Rates: requests and tokens per minute, and requests at once, that each key of a gateway may have.

The keys share the requests that the gateway takes at once by their weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from weft.http.errors import HttpError
from weft.http.key_file import ClientKey
from weft.http.key_rates import KeyRates

ACTIVE_S = 60.0  # how long a key counts as active after its last request


class Rates:
    """The limits `rpm`, `tpm` and `concurrent` of keys, by their names, and the shares of the gateway's own limit."""

    def __init__(self, keys: Sequence[ClientKey], concurrent: int | None = None) -> None:
        self._shares = None if concurrent is None else Shares(concurrent, _weights_of(keys), time.monotonic)
        self._rates = KeyRates(keys)
        self._counts = bool(keys) or concurrent is not None

    def change(self, keys: Sequence[ClientKey]) -> None:
        """Enforce the limits of these keys from now on; running requests and the counts of the minute stay.

        Raises ConfigError for limits that need a missing package.
        """
        self._rates.change(keys)
        if self._shares is not None:
            self._shares.change_weights(_weights_of(keys))

    def enter(self, name: str | None, tokens: int) -> bool:
        """Count a request whose prompt has about `tokens` tokens. Return True if its end must be reported to `leave`.

        Raises HttpError 429 if a limit forbids it.
        """
        tokens = max(tokens, 1)
        self._rates.test(name or "", requests=1, tokens=tokens)
        if self._shares is not None:
            self._shares.enter(name or "")
        self._rates.enter(name or "", tokens=tokens)
        return self._counts

    def limits(self, name: str | None) -> bool:
        """Return True if a key has one of the limits."""
        return self._rates.limits(name or "")

    def counts_tokens(self, name: str | None) -> bool:
        """Return True if a key has a limit of tokens."""
        return self._rates.counts_tokens(name or "")

    def leave(self, name: str | None, tokens: int) -> None:
        """Note the end of a request that `enter` counted; it took `tokens` more tokens than `enter` counted."""
        if self._shares is not None:
            self._shares.leave(name or "")
        self._rates.leave(name or "")
        self._rates.count_answer(name or "", tokens)


def _weights_of(keys: Sequence[ClientKey]) -> dict[str, float]:
    return {key.name: key.weight for key in keys if key.weight is not None}


class Shares:
    """At most `most` requests at once, shared by the keys that are active. `clock` reads monotonic seconds.

    The share of an active key is in proportion to its weight among the active keys. The whole number of requests within
    it is reserved for the key. The rest may be taken by any key beyond its share. Requests without a key count together
    as one key of weight 1.
    """

    def __init__(self, most: int, weights: Mapping[str, float], clock: Callable[[], float]) -> None:
        self._most, self._weights, self._clock = most, dict(weights), clock
        self._running: Counter[str] = Counter()
        self._seen: dict[str, float] = {}

    def change_weights(self, weights: Mapping[str, float]) -> None:
        """Share by these weights from now on."""
        self._weights = dict(weights)

    def enter(self, name: str) -> None:
        """Count a request of a key. Raises HttpError 429 if no place is free for it."""
        now = self._clock()
        self._seen[name] = now
        for other in [key for key, seen in self._seen.items() if seen + ACTIVE_S < now and not self._running[key]]:
            del self._seen[other]
        whole = sum(self._weight(key) for key in self._seen)
        rights = {key: self._most * self._weight(key) / whole for key in self._seen}
        kept = sum(max(0, int(rights[key]) - self._running[key]) for key in self._seen if key != name)
        running = self._running.total()
        if running >= self._most or (self._running[name] + 1 > rights[name] and running + 1 + kept > self._most):
            raise HttpError(
                429,
                f"{running} requests are running, of {self._most} that the gateway takes at once; "
                f"{self._running[name]} of them are yours, whose share is {rights[name]:.1f}",
                code="share-exceeded",
                retry_after_s=1,
            )
        self._running[name] += 1

    def leave(self, name: str) -> None:
        """Note the end of a request that `enter` counted."""
        self._running[name] -= 1

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)
