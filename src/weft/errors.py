"""Errors that reach a user. Each names the value, the limit and the way out, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


def printable(text: str) -> str:
    """Return a text that is safe to print in a terminal.

    Control characters, which could move the cursor or hide text, become escapes. Newlines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class WeftError(Exception):
    """Base of all errors about a user's input, their machine or a failed engine.

    The message may quote text from outside, such as a name, a path or a line of a file, so it is made printable.
    `code` is a short name of the fault in lower case with hyphens, such as "too-many-stages". It stays when the
    message is reworded.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(printable(message))
        self.code = code


class RequestError(WeftError, ValueError):
    """A request that cannot be served as asked: HTTP 400. `param` names the field at fault."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class FatalRequestError(RequestError):
    """A request with which several engines in a row have died; none gets it for a while. HTTP 422."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="request-ends-engines")


class OutputError(WeftError):
    """A request that the model could not answer, while other requests go on: HTTP 500."""


class QueueFullError(WeftError):
    """The bounded queue is full: HTTP 429 with Retry-After."""

    def __init__(self, message: str, *, code: str, retry_after_s: int = 1) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class ModelError(WeftError):
    """A model that is missing, damaged, or of an architecture that Weft does not know."""


class PlanError(WeftError):
    """A layout that is impossible; the message names layouts that are possible."""


class ConfigError(WeftError):
    """A flag or an argument with an invalid value."""


def nearest_name(typed: str, names: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """Return the suggestion "; did you mean 'NAME'?" for a name that is not among `names`; "" if none is near.

    `other_names` maps names that other libraries use to ours, and comes first. After it, a name that begins with
    `typed`, or that `typed` begins with, comes before one that is spelled alike.
    """
    from difflib import get_close_matches  # imported here: only a user who has mistyped waits for it

    names = sorted(names)
    alike = [name for name in names if len(typed) > 2 and (name.startswith(typed) or typed.startswith(name))]
    near = (other_names or {}).get(typed) or next(iter(alike + get_close_matches(typed, names, 1)), None)
    return f"; did you mean {near!r}?" if near else ""


def error_reason(error: Exception) -> str:
    """Return the reason for an error: the system's text if the system refused, else the exception's."""
    return str(getattr(error, "strerror", None) or error)


CORE = -1  # the core's number, in place of a rank


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a failure of a rank or the core. It crosses the socket instead of a stack trace.

    `rank` may be CORE. `phase` is what the rank was doing: start, load, allocate, warm-up or step. `code` is a short
    name of the fault, as of a WeftError, such as "out-of-memory".
    """

    rank: int
    phase: str
    code: str
    cause: str
    hint: str = ""

    def __str__(self) -> str:
        if self.phase == "shutdown":
            return self.cause
        name = "the engine core" if self.rank == CORE else f"rank {self.rank}"
        return f"{name} failed during {self.phase}: {self.cause}" + (f" ({self.hint})" if self.hint else "")


class EngineError(WeftError):
    """The engine stopped: a rank or the core died. Every request in flight fails with this cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(str(cause), code=cause.code)
        self.cause = cause


class NoEngineError(EngineError):
    """No engine could take a request in time. No engine died with it."""
