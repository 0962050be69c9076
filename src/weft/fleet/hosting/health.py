"""Health checks of a set's models: a process that does not respond is killed, so that its keeper starts it again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from weft.fleet.hosting.hosted import Hosted
from weft.fleet.hosting.residency import Residency, State
from weft.fleet.upstreams.upstream import UpstreamError

log = logging.getLogger("weft.hosting")

CHECK_EVERY_S = 1.0  # between two health checks of a model


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
