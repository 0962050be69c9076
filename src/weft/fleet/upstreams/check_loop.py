"""CheckLoop: the gateway's background tasks, none of which is stopped by a wait or a failure of another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

from weft.fleet.upstreams.checks import check_health, read_models
from weft.fleet.upstreams.config import Timeouts
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.logs import event_fields

log = logging.getLogger("weft.gateway")

CHECK_EVERY_S = 2.0
UNHEALTHY_AT_ONCE = 100  # unhealthy replicas checked in a round: thousands of them must not keep the loop busy
CHUNK = 25  # checks that begin before the event loop turns to requests
MODELS_EVERY_S = 30.0  # seconds between two queries for the models of a replica; at once after its recovery


class Looking(Protocol):
    """A source that is checked for changes."""

    async def look(self) -> None: ...


class CheckLoop:
    """Checks all replicas of a fleet, looks at `watches` and calls `also`, every CHECK_EVERY_S seconds.

    Each of these is a separate task, which is started again after its end, so that a task that waits delays no other.
    An unhealthy replica is checked without a pause if no other replica can take its requests. At most UNHEALTHY_AT_ONCE
    unhealthy replicas are checked in a round, in turn.
    """

    def __init__(
        self,
        fleet: Fleet,
        timeouts: Timeouts,
        watches: Iterable[Looking] = (),
        also: Callable[[], None] = lambda: None,
    ) -> None:
        self._fleet, self._timeouts, self._watches, self._also = fleet, timeouts, tuple(watches), also
        self._running: dict[Hashable, asyncio.Task[None]] = {}
        self._due: dict[UpstreamReplica, float] = {}  # the next query for its models
        self._logged = ""
        self._round = 0
        # The last round of an unhealthy replica.
        self._checked: WeakKeyDictionary[UpstreamReplica, int] = WeakKeyDictionary()
        self._hurry = asyncio.Event()

    def look_now(self) -> None:
        """Begin the next round at once."""
        self._hurry.set()

    async def check_forever(self) -> None:
        """Check until it is cancelled."""
        try:
            while True:
                await self.begin_round()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_EVERY_S):
                        await self._hurry.wait()
                self._hurry.clear()
        finally:
            for task in self._running.values():
                task.cancel()

    async def round(self) -> None:
        """Check everything once, and wait for the end."""
        await self.begin_round()
        await asyncio.gather(*self._running.values())

    async def begin_round(self) -> None:
        """Start the tasks that are not running."""
        self._begin("also", self._call_also)
        for number, watch in enumerate(self._watches):
            self._begin(number, watch.look)
        replicas = self._fleet.replicas.values()
        for gone in self._due.keys() - set(replicas):
            del self._due[gone]
        covered = self._fleet.covered_models()
        unhealthy = [replica for replica in replicas if not replica.breaker.closed]
        healthy = [replica for replica in replicas if replica.breaker.closed]
        for count, replica in enumerate([*self._longest_unchecked(unhealthy, covered), *healthy], 1):
            self._begin(replica, partial(self._check, replica, urgent=not replica.covered_by(covered)))
            if count % CHUNK == 0:
                await asyncio.sleep(0)

    def _longest_unchecked(self, unhealthy: list[UpstreamReplica], covered: set[str] | None) -> list[UpstreamReplica]:
        """The unhealthy replicas to check in this round, the longest unchecked first."""
        now = self._fleet.clock()
        due = [one for one in unhealthy if one.breaker.admits(now, urgent=not one.covered_by(covered))]
        if len(due) > UNHEALTHY_AT_ONCE:
            due.sort(key=lambda replica: self._checked.get(replica, 0))
            del due[UNHEALTHY_AT_ONCE:]
        self._round += 1
        self._checked.update(dict.fromkeys(due, self._round))
        return due

    def _begin(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        if name not in self._running:
            self._running[name] = asyncio.create_task(self._guard(name, work))

    async def _guard(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # a bug: without further checks no replica would recover
            if repr(error) != self._logged:
                self._logged = repr(error)
                log.exception("a check failed; checks go on", extra=event_fields("check-failed"))
        finally:
            del self._running[name]

    async def _call_also(self) -> None:
        self._also()

    async def _check(self, replica: UpstreamReplica, *, urgent: bool) -> None:
        was_closed = replica.breaker.closed
        await check_health(replica, self._fleet, self._timeouts, urgent=urgent)
        now = time.monotonic()
        due_now = now >= self._due.get(replica, 0.0) or not was_closed
        if replica.breaker.closed and due_now and await read_models(replica, self._timeouts):
            self._due[replica] = now + MODELS_EVERY_S
