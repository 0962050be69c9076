"""Hosted: the keeper's state of one model of a set."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from weft.fleet.hosting.member import Member
from weft.fleet.hosting.options import stall_limit
from weft.fleet.hosting.set_plan import ModelPlan
from weft.http.errors import HttpError

FAILURES = 5  # consecutive failures, without an answered request between them, after which the model stays down


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
