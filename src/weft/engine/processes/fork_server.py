"""Process that forks ranks: `python -m weft.engine.processes.fork_server FD LIFELINE`, started by
`engine.processes.fork_client`.

It imports torch once and then forks a process for each request, which so starts in milliseconds instead of seconds and
shares the pages of the import. It runs no thread, opens no GPU and draws no random number: a fork is as good as a new
interpreter. It ends with the process that started it; its children have lifelines of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from weft.engine.processes.lifeline import die_with
from weft.machine.hardware import malloc

# By name, since the modules import torch: all that a rank runs.
MODULES = ("weft.ranks.worker.process", "weft.ranks.comm.connect", "weft.ranks.worker.worker")
MAX_REQUEST = 1 << 20  # bytes of a request; most are the environment
MAX_FILES = 250  # descriptors of a request; Linux passes on 253
ARGUMENTS_FIELD = 45  # field of /proc/self/stat behind the command's name: where the arguments begin


class Fork:
    """State of this process: `child` if a fork server has forked it, with the objects of the import frozen."""

    child = False


class ForkRequest(msgspec.Struct, tag=True):
    """Fork a process that calls `main(*arguments)` of a module.

    The descriptors that come with the request get the `numbers`. The last one gets none: it is the gate, where the
    process waits for a byte before it does anything, and ends if the other end closes without a byte. A client that has
    given up the answer so has no process that it does not know of. `cores` are the cores that it may use.
    """

    module: str
    arguments: list[int]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    numbers: list[int]


class Greeting(msgspec.Struct, tag=True):
    """The first message of a process that takes the socket over from another, which may have left answers unread."""

    number: int


class ServerReady(msgspec.Struct, tag=True):
    """The modules are imported; if a `problem` is named, nothing can be forked. `number` is the Greeting's."""

    problem: str = ""
    number: int = 0


class Forked(msgspec.Struct, tag=True):
    """A process has been forked; its pidfd comes with the message."""

    pid: int


class ForkRefused(msgspec.Struct, tag=True):
    """No process was forked."""

    reason: str


class Exited(msgspec.Struct, tag=True):
    """A forked process has ended; `returncode` as subprocess.Popen has it."""

    pid: int
    returncode: int


FromServer = ServerReady | Forked | ForkRefused | Exited


class ForkServer:
    """The server's loop, in the process that forks."""

    def __init__(self, control: socket.socket, held: set[int]) -> None:
        """`held` are descriptors of libraries, whose numbers no request may have."""
        self._control = control
        self._held = held
        self._problem = find_problem()
        self._requests = msgspec.msgpack.Decoder[ForkRequest | Greeting](ForkRequest | Greeting)
        self._children: dict[int, int] = {}  # pid by pidfd
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def send(self, message: FromServer, files: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, which the loop notices
            socket.send_fds(self._control, [msgspec.msgpack.encode(message)], files)

    def serve_forks(self) -> tuple[ForkRequest, list[int]] | None:
        """Serve requests. Returns in a forked process, with its request and descriptors; None at the server's end."""
        self.send(ServerReady(self._problem))
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                    continue
                data, files, _, _ = socket.recv_fds(self._control, MAX_REQUEST, MAX_FILES)
                if not data:
                    return None
                request = self._requests.decode(data)
                if isinstance(request, Greeting):
                    self.send(ServerReady(self._problem, request.number))
                    continue
                if self._fork(request):
                    return request, files
                for file in files:
                    os.close(file)

    def _fork(self, request: ForkRequest) -> bool:
        """Fork; return True in the new process."""
        if taken := self._held.intersection(request.numbers):
            self.send(ForkRefused(f"descriptors {sorted(taken)} are taken"))
            return False
        try:
            pid = os.fork()
        except OSError as error:
            self.send(ForkRefused(str(error)))
            return False
        if pid == 0:
            for descriptor in self._children:
                os.close(descriptor)
            self._control.close()
            return True
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)
        self.send(Forked(pid), [descriptor])
        return False

    def _reap(self, descriptor: int) -> None:
        pid = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self.send(Exited(pid, os.waitstatus_to_exitcode(status)))


def find_problem() -> str:
    """Return the reason why this process must not fork, if there is one."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the import has started {threads - 1} threads"
    if sys.modules["torch"].cuda.is_initialized():
        return "the import has initialised CUDA"
    return ""


def open_descriptors() -> set[int]:
    """Return the descriptors of this process."""
    numbers = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")}  # without the folder's own


def place_descriptors(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files these numbers, which may be other files' of the list."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def rename_process(argv: Sequence[str]) -> None:
    """Write a command line over this process's own, which `ps` shows. A longer one is cut off."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = (int(field) for field in fields[ARGUMENTS_FIELD : ARGUMENTS_FIELD + 2])
        if start:
            line = b"\0".join(os.fsencode(word) for word in argv)[: end - start - 1]
            ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def await_admission(gate: int) -> None:
    """Wait until the client has taken the answer to its request; exit if it has not."""
    if not os.read(gate, 1):
        os._exit(0)
    os.close(gate)


def become_child(request: ForkRequest, files: Sequence[int]) -> None:
    """Give a forked process what a direct start would have given it, and run its module."""
    *files, gate = files
    await_admission(gate)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    place_descriptors(files, request.numbers)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    # The fork itself seeds the standard library's generator again.
    sys.modules["torch"].default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    argv = [str(argument) for argument in request.arguments]
    sys.argv = [request.module, *argv]
    rename_process([sys.executable, "-P", "-m", request.module, *argv])
    Fork.child = True
    gc.enable()
    import_module(request.module).main(*request.arguments)


def main(descriptor: int, lifeline: int) -> None:
    """Import what ranks need, then fork. `descriptor` is the socket of requests, `lifeline` the parent's death pipe."""
    # Signals are the parent's to answer, as for ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in (descriptor, lifeline):
        os.set_inheritable(number, False)
    die_with(lifeline)
    gc.disable()  # what the import creates stays
    for module in MODULES:
        import_module(module)
    malloc.release()  # or a child that trims its memory would write to pages that it shares
    gc.freeze()  # a collection in a child would write to every page
    control = socket.socket(fileno=descriptor)
    server = ForkServer(control, open_descriptors() - {0, 1, 2, descriptor, lifeline})
    if forked := server.serve_forks():
        os.close(lifeline)
        become_child(*forked)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
