"""Cases: what one of them is, and on which server it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from scripts.programs.abuse.target import Target


@dataclass(frozen=True)
class Served:
    """Start of a case's server, beside the flags of all: more `words`, and at most `files` open files.

    Consecutive cases with equal values share one server.
    """

    words: tuple[str, ...] = ()
    files: int | None = None
    template: str | None = None  # of --chat-template


@dataclass(frozen=True)
class Attack:
    """A case beside a neighbour's stream. `finding` is what it replays."""

    name: str
    finding: str
    attack: Callable[[Target], Awaitable[None]]
    served: Served = Served()


@dataclass(frozen=True)
class Outcome:
    """Result of a case with servers of its own: counts of statuses, unexpected events, and the longest time from
    SIGTERM to the end.
    """

    statuses: dict[str, int]
    unexpected: list[str]
    sigterm_s: float | None = None


@dataclass(frozen=True)
class Life:
    """A case that starts and ends servers itself, given the model and flags of all."""

    name: str
    finding: str
    live: Callable[[tuple[str, ...]], Outcome]


Case = Attack | Life
