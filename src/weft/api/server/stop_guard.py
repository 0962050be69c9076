"""Process that ends its parent if no Python runs there after a signal (`api.server.stopping` starts it).

In the parent, the system writes a byte to the socket WAKEUP for each signal, and the event loop or the handler reads
it. While a library keeps Python's lock, neither does, and no deadline of Python's own holds. This process sees the byte
too. It imports next to nothing.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time

LOOK_S = 0.25
STACKS_S = 0.5  # for the parent to print the stacks of its threads


def watch(wakeup: int, lifeline: int, pid: int, first_s: float, later_s: float) -> None:
    """Return when the parent closes `lifeline`, or kill it.

    It is killed `first_s` seconds after the first signal that it does not notice, and `later_s` after any other.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    both = select.poll()
    both.register(lifeline, select.POLLIN)
    both.register(wakeup, select.POLLIN)
    seen = 0
    end_s = 0.0
    while True:
        ready = dict(poll.poll(1000 * LOOK_S) if seen else both.poll())
        if lifeline in ready:
            return
        unread, now = count_unread(wakeup), time.monotonic()
        if unread > seen:
            end_s = min(end_s, now + later_s) if seen else now + (first_s if unread == 1 else later_s)
        seen = unread
        if seen and now > end_s:
            end_parent(pid)
            return


def count_unread(wakeup: int) -> int:
    """Number of unread bytes."""
    (count,) = struct.unpack("i", fcntl.ioctl(wakeup, termios.FIONREAD, b"\0" * 4))
    return int(count)


def end_parent(pid: int) -> None:
    if os.getppid() != pid:
        return
    os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_S)
    print(f"weft: process {pid} has been told to stop and runs no Python; killed", file=sys.stderr, flush=True)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
