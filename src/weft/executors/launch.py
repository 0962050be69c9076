"""Launching: a child process with a socket to it, and the child's own end of that socket.

The socket is the death pipe too. A child ends when it reads its end, whatever its main thread is doing; a
parent that dies in any way closes it. Nothing else has to be sent, and nobody has to be looked for. A second
socket, on which nothing is ever said, lets Linux itself do the same where a thread of the child cannot run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from weft.executors.causes import describe_exit
from weft.executors.framing import Channel, FrameError

M = TypeVar("M")

WORDS_BYTES = 8192  # the end of a child's stderr that is kept for its describe_exit
EXIT_S = 1.0  # what a child gets to end by itself once its socket has closed
FAMILY_EXIT_S = 3  # and one that has children of its own to end
REAP_S = 10.0  # what the system gets to take a killed process's memory back
LAST_WORDS_S = 1.0  # how long the socket's end may come before the process's

# Sockets between our processes. A fork made by somebody else must not hold them open: nobody would see the end.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    for end in _sockets:
        end.close()


os.register_at_fork(after_in_child=_close_in_fork)


class Child(Generic[M]):
    """A process that we started: `channel` talks to it, and its stdout and stderr come out at our stderr."""

    def __init__(
        self,
        module: str,
        messages: Any,
        *,
        env: Mapping[str, str] | None = None,
        files: Iterable[int] = (),
    ) -> None:
        """Run `python -m module FD LIFELINE`. `messages` is the union that it sends; `env` is added to ours;
        `files` are descriptors that it inherits under the same numbers."""
        (ours, theirs), (self._lifeline, its_lifeline) = socket.socketpair(), socket.socketpair()
        _sockets.update((ours, self._lifeline))
        given = (theirs.fileno(), its_lifeline.fileno())
        try:
            self.process = subprocess.Popen(
                # -P: a user's random.py in the current folder is no part of ours.
                [sys.executable, "-P", "-m", module, *map(str, given)],
                env={**os.environ, "PYTHONPATH": _python_path(), **(env or {})},
                pass_fds=(*given, *files),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal reaches the parent alone, and the parent ends its children.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._lifeline.close()
            raise
        finally:
            theirs.close()
            its_lifeline.close()
        self.channel: Channel[M] = Channel(ours, messages)
        self._words = bytearray()
        self._listener = threading.Thread(target=self._pass_on, name=f"weft-stderr-{self.process.pid}", daemon=True)
        self._listener.start()

    def send(self, message: msgspec.Struct) -> None:
        """Nothing happens where the child is gone: whoever listens to it hears of that."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def send_frame(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):
            self.channel.send_frame(frame)

    def kill(self) -> None:
        self.process.kill()

    def describe_exit(self) -> tuple[str, str]:
        """How it ended, and a hint, for a child whose socket has closed without a last word."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_S)
        self.hear_out()
        return describe_exit(self.process.returncode, self._words.decode("utf-8", "replace"))

    def hear_out(self) -> None:
        """Wait until all that it has printed is printed here."""
        self._listener.join(LAST_WORDS_S)

    def close(self) -> None:
        """Give the descriptors back; only once nobody listens any more."""
        self.channel.close()
        self._lifeline.close()

    def _pass_on(self) -> None:
        """Copy what the child prints to our stderr, and remember the end of it."""
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            while words := os.read(pipe.fileno(), 65536):
                self._words += words
                del self._words[:-WORDS_BYTES]
                with contextlib.suppress(OSError):
                    os.write(2, words)


def end_children(children: Iterable[Child[Any]], exit_s: float = EXIT_S) -> None:
    """End processes and wait until they are gone: at once where they can, killed where they cannot."""
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
        child.hear_out()


def _python_path() -> str:
    """Where the child finds this very package, and whatever else the user has said."""
    home, rest = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
    return rest if home == sysconfig.get_path("purelib") else os.pathsep.join(filter(None, (home, rest)))


class Parent(Generic[M]):
    """The child's end, to be made before anything slow is imported. Frames wait in `inbox`; when the parent
    is gone, so is this process, in whatever its main thread is. `farewell` is what it does first, for
    FAMILY_EXIT_S at most; with `lifeline` there is none where the parent has died, but the end is certain."""

    def __init__(self, descriptor: int, messages: Any, lifeline: int | None = None) -> None:
        os.set_inheritable(descriptor, False)
        end = socket.socket(fileno=descriptor)
        _sockets.add(end)
        if lifeline is not None:
            _die_with(lifeline)
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.farewell: Callable[[], None] = lambda: None
        self._channel: Channel[M] = Channel(end, messages)
        threading.Thread(target=self._listen, name="weft-parent", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM):
            # A service manager signals everybody at once, but when to end is the parent's to say.
            signal.signal(number, lambda *_: None)
        faulthandler.enable()

    def send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and this process with it
            self._channel.send(message)

    def end(self) -> NoReturn:
        """Say farewell, and end this process."""
        signal.alarm(FAMILY_EXIT_S)  # which ends it too
        try:
            self.farewell()
        finally:
            os._exit(0)

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self.inbox.put(message)
        except FrameError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            self.end()


def _die_with(lifeline: int) -> None:
    """Have the system kill this process when the other end of `lifeline` closes: also one that is stopped, or
    in a library that lets no other thread run."""
    os.set_inheritable(lifeline, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux only; elsewhere the listening thread has to do
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
