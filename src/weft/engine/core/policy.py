"""StepPolicy: decides which requests take part in a step, and which waiting request is admitted next.

A policy changes nothing but its own state: it reads a SchedulerView and answers, and the scheduler acts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from weft.engine.core.kv import Tables
from weft.engine.core.request import Request
from weft.engine.core.scheduled import StepLimits
from weft.engine.core.sequence import Flight, Sequence
from weft.engine.core.view import SchedulerView
from weft.engine.core.waiting import Owner

by_order = attrgetter("order")


class NextAdmission(NamedTuple):
    """The waiting request to admit next, None if there is none or no room, and the cached blocks of its prefix.

    `starved` is True if a request was passed over or waits because it does not fit in the free blocks.
    """

    sequence: Sequence | None
    prefix: Tables
    starved: bool


NOTHING_WAITS, STARVED = NextAdmission(None, [], False), NextAdmission(None, [], True)


class StepOrder(Protocol):
    """The decisions of a policy for one step, in the order in which the scheduler asks for them."""

    @property
    def newcomer_tokens(self) -> int:
        """Tokens to compute of the shortest newcomer's prompt that was admitted; 0 without a newcomer."""

    def claims(self) -> Iterable[Sequence]:
        """Running requests to preempt before anything else; the next is asked for once the last has lost its blocks."""

    def select(self, most: int) -> list[Sequence]:
        """At most `most` ready requests to take part in the step, in the order of its rows."""

    def victim(self) -> Sequence:
        """The running request that gives up its blocks when the others need more than there are."""

    def prompt_limit(self, decodes: int, delayed: bool) -> int | None:
        """Most prompt tokens in addition to this number of decode tokens; None for no limit.

        `delayed` is True if other requests wait for their next tokens until the step ends.
        """

    def split_prompts(self, prefills: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Selected requests whose prompts are continued before the admissions of the step, and after them."""

    def next_admission(self) -> NextAdmission:
        """The waiting request to admit next, which the scheduler then admits."""

    def widen(self) -> bool:
        """Let all requests take part, after a selection without any row. Returns False if they do already."""

    def end(self, flight: Flight) -> None:
        """Note that the step is scheduled."""


class StepPolicy(Protocol):
    """Decides, for a scheduler whose view it was created with."""

    def place(self, request: Request) -> tuple[int, int]:
        """Number of the owner in whose queue a request waits, and its priority there: the lowest goes first."""

    def waiting(self, owner: Owner) -> int:
        """Number of waiting requests that count when another request of this owner wants to wait."""

    def owner_returns(self, owner: Owner) -> None:
        """Note that an owner without requests gets a request."""

    def begin_step(self, limits: StepLimits) -> StepOrder:
        """Begin the decisions for a step."""


class OrderedPolicy:
    """The policies "fcfs" and "priority": requests are admitted in their order, and running requests take turns.

    The order is by arrival; under "priority", by lower priority value and then by arrival. The last running request in
    this order is preempted first.
    """

    def __init__(self, view: SchedulerView) -> None:
        self._view, self._by_priority = view, view.settings.policy == "priority"

    def place(self, request: Request) -> tuple[int, int]:
        return 0, request.priority if self._by_priority else 0

    def waiting(self, owner: Owner) -> int:
        return self._view.table.waiting

    def owner_returns(self, owner: Owner) -> None:
        """Do nothing: all requests have one owner."""

    def begin_step(self, limits: StepLimits) -> StepOrder:
        return OrderedStep(self._view, limits.prompt_tokens)


class OrderedStep:
    """A step under the policies "fcfs" and "priority"."""

    __slots__ = ("_prompt_tokens", "_view")

    newcomer_tokens = 0

    def __init__(self, view: SchedulerView, prompt_tokens: int) -> None:
        self._view, self._prompt_tokens = view, prompt_tokens

    def claims(self) -> Iterable[Sequence]:
        return ()

    def select(self, most: int) -> list[Sequence]:
        return list(islice(self._view.table.ready, most))

    def victim(self) -> Sequence:
        return max(self._view.table.running.values(), key=by_order)

    def prompt_limit(self, decodes: int, delayed: bool) -> int | None:
        return self._prompt_tokens if delayed else None

    def split_prompts(self, prefills: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        return prefills, []

    def next_admission(self) -> NextAdmission:
        kv = self._view.kv
        sequence = self._view.table.owners[0].queue.first()
        if sequence is None:
            return NOTHING_WAITS
        sequence.unpack_prompt()
        prefix = kv.match_prefix(sequence)
        return NextAdmission(sequence, prefix, False) if kv.has_room(sequence, prefix) else STARVED

    def widen(self) -> bool:
        return False

    def end(self, flight: Flight) -> None:
        """Do nothing: requests take turns by themselves."""
