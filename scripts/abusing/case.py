"""Cases: what one of them is, and on which server it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from scripts.abusing.target import Target


@dataclass(frozen=True)
class Served:
    """How a case's server is started, beside the flags of all: more `words`, and at most `files` open files. Cases in
    a row that are served alike share one server."""

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
    """What a case of its own servers found: counts of statuses, what was not expected, and the longest time from
    SIGTERM to the end."""

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
