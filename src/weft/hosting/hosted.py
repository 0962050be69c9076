"""Hosted: one model of a set, as its keeper knows it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from weft.hosting.member import Member
from weft.hosting.options import stall_limit
from weft.hosting.set_plan import ModelPlan
from weft.serving.errors import HttpError

FAILURES = 5  # in a row, between which no request was answered: then the model stays down


class Hosted:
    """One model of the set: its plan, its process group, the requests that wait for it, and its failures.

    `words`: the flags of its process. `due`: it is to be awake all the time from now on. `ill`: the fault that its
    process told last. `answered_s`: the time of its last response to a look at its health.
    """

    def __init__(self, plan: ModelPlan, member: Member, words: Sequence[str]) -> None:
        self.plan, self.member, self.words = plan, member, tuple(words)
        self.stall_s = stall_limit(self.words)
        self.waiters: list[asyncio.Future[None]] = []
        self.wanted = False  # an administrator, or the start, wants it awake without a request
        self.due = False
        self.failures = 0
        self.fault: HttpError | None = None
        self.again_s = -math.inf
        self.load_s: float | None = None
        self.wake_s: float | None = None
        self.ill = ""
        self.answered_s = self.check_s = -math.inf
        self.check: asyncio.Task[None] | None = None
        self.watch: asyncio.Task[None] | None = None  # for an end of the process that nobody asked for

    async def stop(self) -> None:
        """End the process, as somebody asks."""
        if self.watch is not None and self.watch is not asyncio.current_task():
            self.watch.cancel()
        self.watch = None
        await self.member.stop()

    @property
    def down(self) -> bool:
        """True if it is not started again unless somebody asks for it."""
        return self.failures >= FAILURES
