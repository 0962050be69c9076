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


class SandboxJob(msgspec.Struct, tag="Job"):
    """One call of a handler."""

    data: bytes


class WorkerReady(msgspec.Struct, tag="Ready"):
    """The first message of a worker."""

    pid: int


class JobResult(msgspec.Struct, tag="Answered"):
    """The result of a job."""

    data: bytes


class JobRefused(msgspec.Struct, tag="Refused"):
    """A RequestError that the handler has raised."""

    message: str
    param: str | None
    code: str


class Broken(msgspec.Struct, tag=True):
    """Another exception of the handler, such as a MemoryError. The worker ends."""

    reason: str


FromWorker = WorkerReady | JobResult | JobRefused | Broken
