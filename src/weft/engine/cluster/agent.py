"""The side of `weft cluster` on a node: it starts, finds and ends the server there, and fetches models.

Everything comes on standard input and goes to standard output, so no name needs quoting and no key is on a command
line. The server inherits the lock on its record, and so holds it for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from weft._version import __version__
from weft.cache import cache_dir, make_private, try_lock
from weft.engine.cluster.agent_messages import (
    MARK,
    AnyTask,
    Ended,
    Examine,
    Examined,
    Fetched,
    Leave,
    ProgressLine,
    Pull,
    Ready,
    Reply,
    Start,
    Started,
    Stop,
    Stopped,
    TaskFailed,
)
from weft.engine.cluster.facts import torch_version
from weft.engine.processes.keys import KEY_MODE, VARIABLE
from weft.errors import WeftError, error_reason
from weft.logs import VARIABLE as LOG_LEVEL
from weft.machine.check import Check

LOOK_S = 0.2  # seconds between two looks at the server
SAY_S = 10.0  # seconds between two lines about its progress
END_S = 10.0  # seconds for a server whose start is given up
MAX_TASK_BYTES = 1 << 20
TAIL_BYTES = 8192

FindUrl = Callable[[int], str | None]


class TaskVersion(msgspec.Struct):
    """The part of every task that all versions understand."""

    weft: str


class DoctorReport(msgspec.Struct):
    """The JSON of `weft doctor`, as far as it is used."""

    checks: tuple[Check, ...]


class Record(msgspec.Struct, frozen=True):
    """The file about a server that has been started."""

    pid: int
    argv: tuple[str, ...] = msgspec.field(name="words")
    since_s: float
    environment: str = ""  # digest of the variables that it was given


class Input:
    """Lines of standard input."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._buffer = descriptor, b""

    def line(self, timeout_s: float | None) -> bytes | None:
        """The next line; b"" at the end of the input, None if there is none in time."""
        while b"\n" not in self._buffer:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                return None
            more = os.read(self._descriptor, 65536)
            if not more or len(self._buffer) > MAX_TASK_BYTES:
                return b""
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class Agent:
    """Does one task. `find_url` returns the address of the server with a process id, once it answers requests."""

    def __init__(self, find_url: FindUrl, given: Input, send: Callable[[Reply], None]) -> None:
        self._find_url, self._given, self._send = find_url, given, send

    def do_task(self) -> None:
        line = self._given.line(None) or b""
        try:
            version = msgspec.json.decode(line, type=TaskVersion).weft
            if version != __version__:
                has = f"it has Weft {__version__} for {sys.executable}, and this machine has {version}"
                self._send(TaskFailed(f"{has}; install the same on both"))
                return
            task = msgspec.json.decode(line, type=AnyTask)
            match task:
                case Start():
                    self._start(task)
                case Stop():
                    self._send(Server(task.name, task.node).end(task.grace_s, task.term_s))
                case Pull():
                    self._pull(task)
                case Examine():
                    self._examine(task)
        except msgspec.DecodeError as error:
            self._send(TaskFailed(f"a task that it does not know: {error}"))
        except WeftError as error:
            self._send(TaskFailed(str(error)))
        except OSError as error:
            self._send(TaskFailed(f"{error_reason(error)}{f': {error.filename}' if error.filename else ''}"))

    def _start(self, task: Start) -> None:
        server = Server(task.name, task.node)
        started = server.start(task)
        self._send(started)
        if not self._watch(server, started) and not started.was_running:
            server.end(0.0, END_S)

    def _watch(self, server: Server, started: Started) -> bool:
        """Report until the other side leaves; return False if its input ends instead."""
        ready, say_at = False, time.monotonic() + SAY_S
        while True:
            if not server.is_running():
                self._send(Ended(server.last_line()))
                return True
            if not ready and (url := self._find_url(started.pid)):
                ready = True
                self._send(Ready(url))
            if not ready and time.monotonic() > say_at:
                say_at += SAY_S
                self._send(ProgressLine(server.last_line()))
            line = self._given.line(LOOK_S)
            if line is not None:
                with contextlib.suppress(msgspec.DecodeError):
                    msgspec.json.decode(line, type=Leave)
                    return True
                return False

    def _pull(self, task: Pull) -> None:
        """Run `weft pull`; the end of the input ends it."""
        status, printed, complaints = self._run_weft("pull", *task.flags, task.model, variables=task.environment)
        if status == 0:
            self._send(Fetched(printed))
        else:
            self._send(TaskFailed((complaints or [f"weft pull ended with status {status}"])[-1]))

    def _examine(self, task: Examine) -> None:
        """Run `weft doctor`; the end of the input ends it. Its status says only if a check has failed."""
        status, printed, complaints = self._run_weft("doctor", "--json", *task.flags)
        self._send(decode_doctor(status, printed, complaints))

    def _run_weft(self, *argv: str, variables: Mapping[str, str] | None = None) -> tuple[int, str, list[str]]:
        """Run `weft WORDS`; return its status, what it printed and its lines on standard error, which are sent too.

        The end of the input ends it.
        """
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "weft", *argv],
            env=environment(os.environ, variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        complaints: list[str] = []
        printed: list[bytes] = []
        # Both at the same time: a child that fills a pipe waits until the pipe is read.
        readers = [
            threading.Thread(target=self._copy_lines, args=(child, complaints), daemon=True),
            threading.Thread(target=_read_output, args=(child, printed), daemon=True),
        ]
        for reader in readers:
            reader.start()
        while child.poll() is None:
            if self._given.line(LOOK_S) == b"":
                os.killpg(child.pid, signal.SIGTERM)
                break
        child.wait()
        for reader in readers:
            reader.join()
        return child.returncode, b"".join(printed).decode("utf-8", "replace").strip(), complaints

    def _copy_lines(self, child: subprocess.Popen[bytes], into: list[str]) -> None:
        assert child.stderr
        with child.stderr as lines:
            for line in lines:
                into.append(line.decode("utf-8", "replace").strip())
                self._send(ProgressLine(into[-1]))


def _read_output(child: subprocess.Popen[bytes], printed: list[bytes]) -> None:
    """Keep all that a child prints."""
    assert child.stdout
    with child.stdout as output:
        printed.append(output.read())


def decode_doctor(status: int, printed: str | bytes, complaints: Sequence[str]) -> Examined | TaskFailed:
    """This machine's answer by what `weft doctor --json` has printed; its status says only if a check has failed.

    `complaints` are the lines of its standard error.
    """
    try:
        checks = msgspec.json.decode(printed, type=DoctorReport).checks
    except msgspec.DecodeError:
        return TaskFailed((complaints or [f"weft doctor ended with status {status}"])[-1])
    return Examined(checks, torch_version(), time.time())


class Server:
    """The server of an engine on this node, and the files about it, which only this user can read."""

    def __init__(self, name: str, node: int) -> None:
        """Raises OSError and ModelError if the folder cannot be made."""
        self._folder = cache_dir() / "cluster" / f"{name}-{node}"
        make_private(self._folder)
        self.log = self._folder / "log"
        self._record = self._folder / "record.json"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, task: Start) -> Started:
        """Start the server, or find the server that runs."""
        with open(self._record, "a+b", opener=_open_private) as record:
            if not try_lock(record.fileno()):
                running = self._read_record()
                same = (running.argv, running.environment) == (task.argv, _digest(task.environment))
                return Started(running.pid, str(self.log), True, same, running.since_s)
            argv = [*task.argv, *self._write_secrets(task)]
            self._forget(record)
            with self._open_log() as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "weft", "serve", *argv],
                    env=environment(os.environ, task.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[record.fileno()],
                    start_new_session=True,
                )
            about = Record(self._child.pid, task.argv, time.time(), _digest(task.environment))
            record.write(msgspec.json.encode(about))
            record.flush()
        return Started(about.pid, str(self.log), False, True, about.since_s)

    def is_running(self) -> bool:
        if self._child:
            self._child.poll()
        with contextlib.suppress(FileNotFoundError), self._record.open("rb") as record:
            try:
                fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def end(self, grace_s: float, term_s: float) -> Stopped:
        """End the server: after `grace_s` seconds by SIGTERM, `term_s` seconds later by SIGKILL."""
        if not self.is_running():
            self._remove_secrets()
            return Stopped(None)
        pid = self._read_record().pid
        if not self._ends_within(grace_s):
            _signal(pid, signal.SIGTERM)
        killed = not self._ends_within(term_s)
        if killed:
            _signal(pid, signal.SIGKILL)
            self._ends_within(END_S)
        self._remove_secrets()
        return Stopped(pid, killed)

    def last_line(self) -> str:
        """The last line of the log that says something."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def _read_record(self) -> Record:
        """The record of the server that runs. One that is being started has written none yet."""
        for _ in range(20):
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(self._record.read_bytes(), type=Record)
            time.sleep(LOOK_S)
        raise OSError(f"{self._record} cannot be read, and its lock is held; end the process that holds it")

    def _write_secrets(self, task: Start) -> list[str]:
        """Write the key and the certificate for this user alone; return the flags that name them."""
        argv = []
        for flag, name, text in (
            ("--cluster-key-file", "key", task.key),
            ("--cluster-cert-file", "certificate.pem", task.certificate),
        ):
            path = self._folder / name
            path.unlink(missing_ok=True)
            if text:
                write_private(path, text)
                argv += [flag, str(path)]
        return argv

    def _remove_secrets(self) -> None:
        for name in ("key", "certificate.pem"):
            (self._folder / name).unlink(missing_ok=True)

    def _forget(self, record: IO[bytes]) -> None:
        record.seek(0)
        record.truncate()

    @contextlib.contextmanager
    def _open_log(self) -> Iterator[int]:
        """A new log; the one before is kept as log.1."""
        if self.log.exists():
            os.replace(self.log, self.log.with_name("log.1"))
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, KEY_MODE)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def environment(ours: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Environment of a server: ours without a cluster key, at the level at which its progress is logged."""
    kept = {name: value for name, value in ours.items() if name != VARIABLE}
    return {LOG_LEVEL: "INFO", **kept, **added}


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read, from its first moment on. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, KEY_MODE)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _digest(variables: Mapping[str, str]) -> str:
    """Digest of variables and their values, which may be secrets."""
    return hashlib.sha256(msgspec.json.encode(sorted(variables.items()))).hexdigest()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, KEY_MODE)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run_agent(find_url: FindUrl) -> None:
    """Do the task that comes on standard input."""
    lock = threading.Lock()

    def send(reply: Reply) -> None:
        # The other side may have left; a server that is to run on must not hear of it.
        with lock, contextlib.suppress(OSError):
            os.write(1, MARK + msgspec.json.encode(reply) + b"\n")

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sshd's at the end of a session, which the input tells as well
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Agent(find_url, Input(0), send).do_task()
