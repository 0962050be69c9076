"""Times of a rank's exchanges with other ranks, by the host's clock."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class ExchangeTimes:
    """Seconds that a rank has spent in the calls of one group or link, and of those waiting for other ranks.

    `native` are the same two times in nanoseconds, of the exchanges that C++ does by itself. Only the thread of the
    rank writes any of them.
    """

    def __init__(self) -> None:
        self.native = (ctypes.c_int64 * 2)()
        self.running = False
        self._spent_s = self._waited_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds in all exchanges."""
        return self._spent_s + self.native[0] / 1e9

    @property
    def waited_s(self) -> float:
        """Seconds of `spent_s` in which other ranks had not come yet, as far as the transport tells them apart."""
        return self._waited_s + self.native[1] / 1e9

    def add_spent(self, began_s: float) -> None:
        """Add the time since `began_s`, by `perf_counter`."""
        self._spent_s += perf_counter() - began_s

    def add_waited(self, began_s: float) -> None:
        """Add the time since `began_s`, which a call of `timed` adds to the time spent as well."""
        self._waited_s += perf_counter() - began_s


def total_times(several: Iterable[ExchangeTimes]) -> ExchangeTimes:
    """Times of several groups or links together."""
    total = ExchangeTimes()
    for times in several:
        total._spent_s += times.spent_s
        total._waited_s += times.waited_s
    return total


class Timed(Protocol):
    """A group or link whose calls are timed."""

    @property
    def times(self) -> ExchangeTimes: ...


S = TypeVar("S", bound=Timed)


def timed(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Add the time of a method's calls to `times`; calls within another timed one count once."""

    @functools.wraps(call)
    def measured(self: S, *arguments: P.args, **named: P.kwargs) -> R:
        times: Any = self.times
        if times.running:
            return call(self, *arguments, **named)
        times.running, began_s = True, perf_counter()
        try:
            return call(self, *arguments, **named)
        finally:
            times.running = False
            times.add_spent(began_s)

    return cast(Callable[Concatenate[S, P], R], measured)
