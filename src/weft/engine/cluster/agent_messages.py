"""Messages between `weft cluster` and its agent on a node: lines of JSON over ssh's standard input and output."""

from __future__ import annotations

import msgspec

from weft._version import __version__
from weft.machine.check import Check

MARK = b"weft-agent "  # begins a reply's line: a login shell may print lines of its own


class Task(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """Base of the tasks. `weft` is the version of the side that asks."""

    weft: str = __version__


class Start(Task, frozen=True, kw_only=True, tag=True):
    """Start `weft serve WORDS`, unless it runs already.

    `name` and `node` tell engines and nodes apart. `key` is the cluster key, "" for one node; `certificate` the node's
    bundle of PEM, "" for none. `environment` is added to the server's: keys of clients, GPUs.
    """

    name: str
    node: int
    argv: tuple[str, ...] = msgspec.field(name="words")
    key: str = ""
    certificate: str = ""
    environment: dict[str, str] = {}


class Stop(Task, frozen=True, kw_only=True, tag=True):
    """End what `Start` has started: after `grace_s` seconds by SIGTERM, and `term_s` seconds later by SIGKILL."""

    name: str
    node: int
    grace_s: float
    term_s: float


class Pull(Task, frozen=True, kw_only=True, tag=True):
    """Fetch a model by `weft pull FLAGS MODEL`, with `environment` added to the process's environment."""

    model: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class Examine(Task, frozen=True, kw_only=True, tag=True):
    """Check the machine by `weft doctor --json FLAGS`."""

    flags: tuple[str, ...] = ()


AnyTask = Start | Stop | Pull | Examine


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Second message after Start: let the server run on. Without it, the end of the input ends the server."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The server has been started, or has been found. `since_s` is in seconds since 1970."""

    pid: int
    log: str
    was_running: bool
    same: bool
    since_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The server answers requests."""

    url: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The server has ended; `line` is the last of its log."""

    line: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The end of Stop; `pid` is None if nothing ran."""

    pid: int | None
    killed: bool = False


class ProgressLine(msgspec.Struct, frozen=True, tag="Progress"):
    """A line about what goes on."""

    line: str


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The model is here."""

    path: str


class Examined(msgspec.Struct, frozen=True, tag=True):
    """The doctor's checks of the machine, its torch ("" without one), and its clock, in seconds since 1970."""

    checks: tuple[Check, ...]
    torch: str
    clock_s: float


class TaskFailed(msgspec.Struct, frozen=True, tag="Failed"):
    """The task cannot be done: the reason, with the way out."""

    reason: str


Reply = Started | Ready | Ended | Stopped | ProgressLine | Fetched | Examined | TaskFailed
