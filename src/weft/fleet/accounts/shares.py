"""Shares: the requests that all keys together may have at once, and the share of each key by its weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from weft.http.errors import HttpError

ACTIVE_S = 60.0  # how long a key counts as active after its last request


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
