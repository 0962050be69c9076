"""Calls of Ray's library with a bound: without the head of its cluster most of them never return.

Each call runs in a thread of its own, so that signals are handled during it, and Ray's handler of SIGTERM, which waits
for the call, is not set.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from weft.errors import ConfigError, error_reason
from weft.logs import event_fields

log = logging.getLogger("weft.cluster")

ANSWER_S = 2.0  # seconds for a TCP connection to the head: a round trip, even to a busy machine, takes far less
JOIN_S = 60.0  # seconds to join a cluster whose head is reached; Ray needs 5 to 20 on a busy machine
LOOK_S = 3.0  # seconds between two looks at whether the head is still there
LOOKS = 2  # looks in a row that must fail: one may fall into a moment without a free place in the head's queue
SAY_S = 15.0  # seconds between two log lines of a call that takes long
NO_CLUSTER, GONE = "no-ray-cluster", "ray-cluster-gone"  # codes: nothing listens; dead, or silent

T = TypeVar("T")


class _NoHandlerNotice(logging.Filter):
    """Drops the warning that Ray, joined from a thread, has set no handler of SIGTERM."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "SIGTERM handler is not set" not in str(record.msg)


def join_cluster(ray: Any, address: str, limit_s: float, **options: Any) -> None:
    """Have Ray join the cluster at an address, HOST:PORT or a word that Ray knows, within `limit_s` seconds.

    Raises ConfigError if nothing listens there or if Ray has not joined in time, and what `ray.init` raises.
    """
    if is_place(address) and (problem := connect_problem(address)):
        raise ConfigError(
            f"no Ray cluster answers at {address}: {problem}; start one there with `ray start --head`, or correct "
            "RAY_ADDRESS",
            code=NO_CLUSTER,
        )
    logging.getLogger("ray._private.worker").addFilter(_NoHandlerNotice())

    def join() -> None:
        ray.init(address=address, logging_level=logging.WARNING, **options)

    call_watched(join, address, min(limit_s, JOIN_S), "let this program in")
    if threading.current_thread() is threading.main_thread():
        # In place of the handler of Ray's C++, which prints its stack; Python's own was never replaced.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def call_watched(function: Callable[[], T], address: str, limit_s: float, what: str = "answered") -> T:
    """The result of a function that calls Ray. Its errors pass.

    Args:
        function: runs in a daemon thread, and is left alone if it does not return.
        address: HOST:PORT of the cluster's head; without a port it is not looked after.
        limit_s: seconds for the whole call.
        what: completes "the Ray cluster has not" in the error.

    Raises: ConfigError: the time is over, or nothing listens at the address any more.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="weft-ray", daemon=True)
    thread.start()
    _await_call(thread, address, time.monotonic() + limit_s, f"{what} within {limit_s:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _await_call(thread: threading.Thread, address: str, deadline: float, what: str) -> None:
    """Wait for the end of a call. Raises ConfigError."""
    missed, say_at = 0, time.monotonic() + SAY_S
    while True:
        thread.join(max(0.0, min(LOOK_S, deadline - time.monotonic())))
        if not thread.is_alive():
            return
        problem = connect_problem(address) if is_place(address) else ""
        missed = missed + 1 if problem else 0
        if missed >= LOOKS:
            raise _gone(address, f"has gone: {problem}")
        if time.monotonic() >= deadline:
            raise _gone(address, f"has not {what}")
        if time.monotonic() >= say_at:
            say_at += SAY_S
            log.info("waiting for the Ray cluster at %s", address, extra=event_fields("ray-awaited", address=address))


def _gone(address: str, what: str) -> ConfigError:
    """The error for a cluster that is dead or silent, after which this process ends without Ray's own end of it."""
    atexit.unregister(_exit_at_once)
    atexit.register(_exit_at_once)
    return ConfigError(
        f"the Ray cluster at {address} {what}; see `ray status`, and start it again with `ray stop` and `ray start` "
        "if it is dead",
        code=GONE,
    )


def _exit_at_once() -> None:
    """End this process in place of Ray's handlers, which would wait for the call that hangs, or crash."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def is_place(address: str) -> bool:
    """Return True for HOST:PORT, and False for words such as "auto"."""
    return address.rpartition(":")[2].isdecimal()


def connect_problem(address: str) -> str:
    """Reason why nothing can be reached at HOST:PORT, with ray:// or without; "" if somebody listens there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return error_reason(error)
    return ""


def call_bounded(function: Callable[[], object], seconds: float) -> None:
    """Call a function of Ray's, and wait no longer than this for its end."""
    thread = threading.Thread(target=function, name="weft-ray", daemon=True)
    thread.start()
    thread.join(seconds)
