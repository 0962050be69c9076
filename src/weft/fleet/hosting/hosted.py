"""Hosted: the keeper's state of one model of a set, and the checks of its health.

A process that does not respond is killed, so that the keeper starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from weft.fleet.hosting.member import Member
from weft.fleet.hosting.options import stall_limit
from weft.fleet.hosting.residency import Residency, State
from weft.fleet.hosting.set_plan import ModelPlan
from weft.fleet.upstreams.upstream import UpstreamError
from weft.http.errors import HttpError

log = logging.getLogger("weft.hosting")

FAILURES = 5  # consecutive failures, without an answered request between them, after which the model stays down
CHECK_EVERY_S = 1.0  # between two health checks of a model


class Hosted:
    """One model of the set: its plan, its process group, the requests that wait for it, and its failures.

    `argv`: the flags of its process. `due`: it must stay loaded (pinned, or loaded with the set). `engine_fault`: the
    fault in its process's last response to a health check; `answered_s` is the time of that response.
    """

    def __init__(self, plan: ModelPlan, member: Member, argv: Sequence[str]) -> None:
        self.plan, self.member, self.argv = plan, member, tuple(argv)
        self.stall_s = stall_limit(self.argv)
        self.waiters: list[asyncio.Future[None]] = []
        self.wanted = False  # an administrator, or the start, wants it awake without a request
        self.due = False
        self.failures = 0
        self.fault: HttpError | None = None
        self.again_s = -math.inf
        self.load_s: float | None = None
        self.wake_s: float | None = None
        self.engine_fault = ""
        self.answered_s = self.check_s = -math.inf
        self.check: asyncio.Task[None] | None = None
        self.watch: asyncio.Task[None] | None = None  # waits for an unexpected end of the process

    async def stop(self) -> None:
        """End the process on request."""
        if self.watch is not None and self.watch is not asyncio.current_task():
            self.watch.cancel()
        self.watch = None
        await self.member.stop()

    @property
    def down(self) -> bool:
        """True if it is started again only on an administrator's request."""
        return self.failures >= FAILURES


class HealthChecks:
    """Checks the health of all models; `spawn` starts each check as a task."""

    def __init__(
        self,
        models: Mapping[str, Hosted],
        residency: Residency,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._models, self._residency, self._clock, self._spawn = models, residency, clock, spawn

    def discount_suspension(self, paused_s: float) -> None:
        """Do not count `paused_s` seconds during which this process was itself suspended.

        The models were probably suspended too, as in a paused container, and responses may still be unread.
        """
        if paused_s > 0:
            now = self._clock()
            for hosted in self._models.values():
                hosted.answered_s = min(now, hosted.answered_s + paused_s)

    def begin(self) -> None:
        """Start the health checks that are due. A check that waits for its response does not delay the others."""
        now = self._clock()
        for hosted in self._models.values():
            waits = hosted.check is not None and not hosted.check.done()
            if hosted.member.is_running and now >= hosted.check_s and not waits:
                hosted.check_s = now + CHECK_EVERY_S
                hosted.check = self._spawn(self._check(hosted))

    async def _check(self, hosted: Hosted) -> None:
        """Check a model's health. A process that does not respond for `stall_s` is killed and started again.

        While it loads it need not respond, but must not be suspended. The process itself handles faults of its engine.
        """
        name, member = hosted.plan.entry.name, hosted.member
        try:
            if self._residency.tenants[name].state is not State.LOADING:
                hosted.engine_fault = await member.ask_health(hosted.stall_s)
            elif member.is_suspended:
                raise UpstreamError("it is stopped", code="process-stopped")
        except UpstreamError as error:
            silent_s = self._clock() - hosted.answered_s
            if silent_s >= hosted.stall_s:
                reason = f"its process showed no sign of life for {silent_s:.1f} s: {error}"
                log.error("%s is killed: %s", name, reason)
                member.kill(reason)
                hosted.answered_s = self._clock()  # its end has not been noticed yet
            return
        hosted.answered_s = self._clock()
