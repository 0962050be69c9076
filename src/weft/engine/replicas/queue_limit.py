"""QueueLimit: how many requests may run or wait at an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.config import EngineConfig
from weft.engine.core.request import Request
from weft.errors import QueueFullError


class QueueLimit(NamedTuple):
    """At most `capacity` requests run or wait at once: of all clients, or of each owner."""

    capacity: int
    per_owner: bool = False

    @classmethod
    def of(cls, config: EngineConfig, capacity: int) -> QueueLimit:
        """The limit by an engine's scheduling policy."""
        return cls(capacity, config.scheduling_policy == "fair")

    def check(self, requests: Sequence[Request], open_requests: int, owned: Callable[[int], int]) -> None:
        """Raise QueueFullError if `open_requests` leave no room; `owned` counts an owner's.

        `requests` have one owner.
        """
        if open_requests + len(requests) <= self.capacity:
            return
        if self.per_owner and requests:
            open_requests = owned(requests[0].owner)
            if open_requests + len(requests) <= self.capacity:
                return
        raise QueueFullError(
            f"{open_requests} requests run or wait, {len(requests)} more are over the limit of {self.capacity}; try "
            "again later, or raise --max-num-queued-reqs",
            code="queue-full",
        )
