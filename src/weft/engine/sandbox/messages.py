"""Messages between a sandbox's processes and the process that uses them."""

from __future__ import annotations

import msgspec

from weft.engine.sandbox.limits import Limits


class Registration(msgspec.Struct):
    """Work to fork workers for: `target`, as "module:function", makes a handler of `setup`."""

    number: int
    target: str
    setup: bytes
    limits: Limits


class Job(msgspec.Struct, tag=True):
    """One call of a handler."""

    data: bytes


class Ready(msgspec.Struct, tag=True):
    """The first message of a worker."""

    pid: int


class Answered(msgspec.Struct, tag=True):
    """The result of a job."""

    data: bytes


class Refused(msgspec.Struct, tag=True):
    """A RequestError that the handler has raised."""

    message: str
    param: str | None
    code: str


class Broken(msgspec.Struct, tag=True):
    """Another exception of the handler, such as a MemoryError. The worker ends."""

    reason: str


FromWorker = Ready | Answered | Refused | Broken
