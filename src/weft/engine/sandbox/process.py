"""Process that forks workers: `python -m weft.engine.sandbox.process CONTROL LIFELINE`, started by
`engine.sandbox.zygote`.

It has imported and prepared what the workers share, so that a worker starts in milliseconds: another takes the place of
a worker that a job has killed before this is noticeable. It runs no thread and no job itself.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import NoReturn

import msgspec

from weft.engine.processes.framing import FrameDecoder, encode_frame
from weft.engine.processes.lifeline import die_with
from weft.engine.sandbox.limits import Limits, confine, grant_cpu
from weft.engine.sandbox.messages import (
    Broken,
    FromWorker,
    JobRefused,
    JobResult,
    Registration,
    SandboxJob,
    WorkerReady,
)
from weft.errors import RequestError

Handler = Callable[[bytes], bytes]

# The control socket carries an operation and the number of a registration, with descriptors. REGISTER has a file with
# the Registration, FORK the worker's socket and lifeline, FORGET none.
ORDER = struct.Struct("<cI")
REGISTER, FORK, FORGET = b"r", b"f", b"x"
MAX_FILES = 2
RECEIVE_BYTES = 256 << 10


def prepare(registration: Registration) -> Handler:
    """Return the handler of a registration, or one that says why there is none."""
    module, _, function = registration.target.partition(":")
    try:
        handler: Handler = getattr(import_module(module), function)(registration.setup)
    except BaseException as error:  # such as the panic of a library in Rust, which is no Exception
        reason = f"{type(error).__name__}: {error}"

        def fail(data: bytes) -> bytes:
            raise RuntimeError(reason)

        return fail
    return handler


def serve(control: socket.socket, lifeline: int) -> None:
    """Follow orders until the parent's end of `control` closes. Workers leave by `os._exit`."""
    registered: dict[int, tuple[Handler, Limits]] = {}
    while True:
        data, files, _, _ = socket.recv_fds(control, ORDER.size, MAX_FILES)
        if not data:
            return
        operation, number = ORDER.unpack(data)
        if operation == FORGET:
            registered.pop(number, None)
            continue
        if operation == REGISTER:
            with os.fdopen(files[0], "rb") as file:
                registration = msgspec.msgpack.decode(file.read(), type=Registration)
            registered[number] = prepare(registration), registration.limits
            gc.freeze()  # a collection in a child would write to every page that it shares
            continue
        if os.fork() == 0:
            control.close()
            os.close(lifeline)
            run_worker(files, *registered[number])
        for file_number in files:
            os.close(file_number)


def run_worker(files: list[int], handler: Handler, limits: Limits) -> NoReturn:
    """Answer jobs under limits until the other end closes. `files`: the socket of jobs, and the lifeline."""
    work, lifeline = files
    die_with(lifeline)
    end = socket.socket(fileno=work)
    end.sendall(encode_frame(WorkerReady(os.getpid())))
    confine(limits)
    gc.enable()
    decoder: FrameDecoder[SandboxJob] = FrameDecoder(SandboxJob)
    try:
        while data := end.recv(RECEIVE_BYTES):
            grant_cpu(limits.cpu_s)
            if not answer_all(end, handler, decoder.feed(data)):
                break
    finally:
        os._exit(0)


def answer_all(end: socket.socket, handler: Handler, jobs: Iterable[SandboxJob]) -> bool:
    """Answer jobs, each before the next one begins: the parent takes the first without an answer as the running one.

    Return False after one that may have left the process unfit for more.
    """
    for job in jobs:
        reply = answer(handler, job)
        end.sendall(encode_frame(reply))
        if isinstance(reply, Broken):
            return False
    return True


def answer(handler: Handler, job: SandboxJob) -> FromWorker:
    """Return the reply to one job, whatever the handler raises."""
    try:
        return JobResult(handler(job.data))
    except RequestError as error:
        return JobRefused(str(error), error.param, error.code)
    except BaseException as error:  # such as the panic of a library in Rust, which is no Exception
        return Broken(f"{type(error).__name__}: {error!s:.500}")


def main(control: int, lifeline: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to answer
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no caller waits for workers
    for descriptor in (control, lifeline):
        os.set_inheritable(descriptor, False)
    die_with(lifeline)
    gc.disable()
    serve(socket.socket(fileno=control), lifeline)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
