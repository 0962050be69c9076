"""The errors that reach a user. Each names the value, the limit and the way out, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


def printable(text: str) -> str:
    """A text as a terminal may show it: control characters, which could move its cursor or hide what was printed, as
    their escapes. Newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class WeftError(Exception):
    """Anything Weft says to a user about their input, their machine or a failed engine. It may quote what somebody else
    wrote: a name, a path, a line of a file."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class RequestError(WeftError, ValueError):
    """A request that cannot be served as asked: HTTP 400. `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OutputError(WeftError):
    """A request that the model could not answer, while others go on: HTTP 500."""


class QueueFullError(WeftError):
    """The bounded queue is full: HTTP 429 with Retry-After."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(WeftError):
    """A model that is missing, damaged, or of an architecture that Weft does not know."""


class PlanError(WeftError):
    """A layout that cannot be, with those that can."""


class ConfigError(WeftError):
    """A flag or an argument with a value that it cannot take."""


def nearest_name(typed: str, names: Iterable[str], habits: Mapping[str, str] | None = None) -> str:
    """The suggestion "; did you mean 'NAME'?" for a name that is none of `names`; "" if none is near.

    `habits` maps names that other libraries use to ours. Beyond it, a name that begins with `typed` or that `typed`
    begins with goes before one that is spelled alike.
    """
    from difflib import get_close_matches  # here: only who has made a mistake waits for it

    names = sorted(names)
    alike = [name for name in names if len(typed) > 2 and (name.startswith(typed) or typed.startswith(name))]
    near = (habits or {}).get(typed) or next(iter(alike + get_close_matches(typed, names, 1)), None)
    return f"; did you mean {near!r}?" if near else ""


def error_reason(error: Exception) -> str:
    """Why something could not be done, in the system's words where it was the system that refused."""
    return str(getattr(error, "strerror", None) or error)


CORE = -1  # the core, where ranks are counted


class Cause(msgspec.Struct, frozen=True):
    """Why a rank, or the core, failed: what crosses the socket instead of a stack trace.

    `rank` may be CORE; `phase` is what it was doing: start, load, allocate, warm-up, step.
    """

    rank: int
    phase: str
    cause: str
    hint: str = ""

    def __str__(self) -> str:
        if self.phase == "shutdown":
            return self.cause
        who = "the engine core" if self.rank == CORE else f"rank {self.rank}"
        return f"{who} failed during {self.phase}: {self.cause}" + (f" ({self.hint})" if self.hint else "")


class EngineError(WeftError):
    """The engine stopped: a rank or the core died. Every request in flight fails with this cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(str(cause))
        self.cause = cause
