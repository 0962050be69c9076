"""Child and Parent: a child process with a socket to it, and the child's own end of that socket.

The socket is the death pipe too. A child exits when it reads the end of the stream, whatever its main thread is doing,
and a parent that dies in any way closes the socket. Nothing else has to be sent, and no process has to be searched for.
A second socket, the lifeline, carries no data: with it Linux itself kills a child in which no thread can run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from weft.engine.processes.causes import ExitReason, describe_exit
from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.forks import start_process
from weft.engine.processes.framing import Channel, FrameError, encode_frame
from weft.engine.processes.lifeline import die_with
from weft.engine.processes.liveness import Alive, Heartbeat, catches_signal
from weft.engine.processes.open_sockets import open_sockets

M = TypeVar("M")

LONGEST_LINE_BYTES = 65536  # bytes of a child's output that are held back until the line ends
OUTPUT_TAIL_BYTES = 8192  # the end of a child's output, kept for describe_exit
EXIT_S = 1.0  # seconds for a child to exit by itself once its socket has closed,
FAMILY_EXIT_S = 3  # and for a child that has children of its own to end
STACKS_SIGNAL = signal.SIGUSR1  # a child prints the stacks of its threads
REAP_S = 10.0  # seconds for the system to take a killed process's memory back
KEY_VARIABLE = "WEFT_CLUSTER_KEY"
EXIT_GAP_S = 1.0  # the socket may close this many seconds before its process exits


class Child(Generic[M]):
    """A process that we started. `channel` connects to it, and its stdout and stderr are copied to our stderr."""

    def __init__(
        self,
        module: str,
        messages: Any,
        *,
        env: Mapping[str, str] | None = None,
        files: Iterable[int] = (),
        server: ForkClient | None = None,
    ) -> None:
        """Run `python -m module FD LIFELINE`.

        `messages` is the union of the messages that the child sends. `env` is added to our environment. `files` are
        descriptors that the child inherits under the same numbers. `server` forks the process if it can.
        """
        (ours, theirs), (self._lifeline, child_lifeline) = socket.socketpair(), socket.socketpair()
        open_sockets.update((ours, self._lifeline))
        inherited = (theirs.fileno(), child_lifeline.fileno())
        try:
            self.process = start_process(module, inherited, (*inherited, *files), child_environment(env), server)
        except BaseException:
            ours.close()
            self._lifeline.close()
            raise
        finally:
            theirs.close()
            child_lifeline.close()
        self.channel: Channel[M] = Channel(ours, messages)
        self._sending = threading.Lock()
        self._output_tail = bytearray()
        self._copier = threading.Thread(target=self._copy_output, name=f"weft-stderr-{self.process.pid}", daemon=True)
        self._copier.start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; without effect if the child is gone, which the thread that listens to it notices."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):
            self.channel.send_frame(frame)

    def offer(self, message: msgspec.Struct) -> None:
        """Send a short message if that takes no waiting for a child that reads nothing."""
        self.channel.offer(message, self._sending)

    def kill(self) -> None:
        self.process.kill()

    def print_stacks(self) -> None:
        """Have the child print the stacks of its threads, unless it has ended or does not listen for the signal yet.

        The signal would end a child that has no handler.
        """
        if catches_signal(self.process.pid, STACKS_SIGNAL):
            self.process.send_signal(STACKS_SIGNAL)

    def describe_exit(self) -> ExitReason:
        """Return the reason why a child ended, whose socket has closed without a last message."""
        ended = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_GAP_S)
            ended = True
        self.drain_output()
        return describe_exit(self.process.returncode, self._output_tail.decode("utf-8", "replace"), ended=ended)

    def drain_output(self) -> None:
        """Wait until everything that the child has printed is printed here."""
        self._copier.join(EXIT_GAP_S)

    def close(self) -> None:
        """Close the descriptors. To be called only once no thread listens any more."""
        self.channel.close()
        self._lifeline.close()

    def _copy_output(self) -> None:
        """Copy the child's output to our stderr in whole lines, and keep the end of it.

        Several children write at the same time, a stack trace in pieces smaller than a line.
        """
        assert self.process.stdout is not None
        unfinished = b""
        with self.process.stdout as pipe:
            while output := os.read(pipe.fileno(), 65536):
                self._output_tail += output
                del self._output_tail[:-OUTPUT_TAIL_BYTES]
                lines, newline, unfinished = (unfinished + output).rpartition(b"\n")
                _write_to_stderr(lines + newline)
                if len(unfinished) > LONGEST_LINE_BYTES:
                    _write_to_stderr(unfinished)
                    unfinished = b""
        _write_to_stderr(unfinished)


def _write_to_stderr(output: bytes) -> None:
    if output:
        with contextlib.suppress(OSError):
            os.write(2, output)


def end_children(children: Iterable[Child[Any]], exit_s: float = EXIT_S) -> None:
    """End processes and wait until they are gone. Processes that do not exit within `exit_s` seconds are killed."""
    children = list(children)
    for child in children:
        child.channel.hang_up()
    for seconds in (exit_s, REAP_S):
        deadline = time.monotonic() + seconds
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.kill()
    for child in children:
        child.drain_output()


def child_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment, in which a child finds this very package, with `env` added.

    The cluster key is left out: children are connected already.
    """
    ours = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    return {**ours, "PYTHONPATH": _python_path(), **(env or {})}


def _python_path() -> str:
    """PYTHONPATH with which the child imports this very package, and whatever else the user has set."""
    home, users = str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")
    known = home in (sysconfig.get_path("purelib"), users.split(os.pathsep)[0])
    return users if known else os.pathsep.join(filter(None, (home, users)))


class Parent(Generic[M]):
    """The child's end of the socket, to be created before anything slow is imported.

    Messages wait in `inbox`. When the parent is gone, this process exits, whatever its main thread is doing. It first
    calls `before_exit`, which has FAMILY_EXIT_S seconds. With `lifeline`, a parent's death kills this process at once,
    without `before_exit`, but with certainty. A Heartbeat is answered with `sign`.
    """

    def __init__(self, descriptor: int, messages: Any, lifeline: int | None = None) -> None:
        os.set_inheritable(descriptor, False)
        end = socket.socket(fileno=descriptor)
        open_sockets.add(end)
        if lifeline is not None:
            die_with(lifeline)
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.before_exit: Callable[[], None] = lambda: None
        self.sign: Callable[[], Alive] = Alive
        self._sending = threading.Lock()
        self._channel: Channel[M] = Channel(end, messages)
        threading.Thread(target=self._listen, name="weft-parent", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM):
            # A service manager signals all processes at once, but the parent decides when its children end.
            signal.signal(number, lambda *_: None)
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL, all_threads=True)

    def send(self, message: msgspec.Struct) -> None:
        frame = encode_frame(message)
        with self._sending, contextlib.suppress(OSError):  # the parent is gone, and this process with it
            self._channel.send_frame(frame)

    def exit(self) -> NoReturn:
        """Call `before_exit` and exit this process."""
        signal.alarm(FAMILY_EXIT_S)  # SIGALRM ends the process too
        try:
            self.before_exit()
        finally:
            os._exit(0)

    def _listen(self) -> None:
        try:
            for message in self._channel:
                if isinstance(message, Heartbeat):
                    self._channel.offer(self.sign(), self._sending)
                else:
                    self.inbox.put(message)
        except FrameError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            self.exit()
