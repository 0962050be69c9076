"""Causes of failure, in the user's words, from an exception or from the exit of a process."""

from __future__ import annotations

import signal
import sys
import traceback

from weft.errors import Cause, EngineError, WeftError

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
OUT_OF_MEMORY_HINTS = {
    "load": "cut the model across more ranks with --tensor-parallel-size or --pipeline-parallel-size, "
    "or take a quantised checkpoint",
    "allocate": "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-batched-tokens",
    "step": "lower --max-num-batched-tokens or --max-num-seqs, or --gpu-memory-utilization",
}
STUCK = "its stack is printed above; weft hardware tests the GPUs and the links between them"
KILLED = "if nobody killed it, the system was out of memory: see `dmesg`"


def cause_of(error: BaseException, rank: int, phase: str) -> Cause:
    """Return one line for the user. For a bug, print the stack trace to stderr too; advice needs none."""
    if isinstance(error, EngineError):
        return error.cause
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(words in text.lower() for words in OUT_OF_MEMORY):
        return Cause(rank, phase, text or "out of memory", OUT_OF_MEMORY_HINTS.get(phase, ""))
    if isinstance(error, WeftError):
        return Cause(rank, phase, text, code=error.code)
    if not lost_peer(error):
        traceback.print_exception(error, file=sys.stderr)
    return Cause(rank, phase, f"{type(error).__name__}: {text}" if text else type(error).__name__)


def lost_peer(error: BaseException) -> bool:
    """Return True if a rank fails only because it can no longer reach another, whose failure is the root cause."""
    return isinstance(error, ConnectionError)


def describe_exit(returncode: int | None, stderr: str) -> tuple[str, str]:
    """Return cause and hint for a process that ended without a last message; `stderr` is the end of its output."""
    if returncode is None:
        return "closed its connection", ""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any(line.startswith("Timeout (") for line in lines):  # faulthandler's: the process was stuck and ended itself
        return "was stuck and ended itself", STUCK
    # A crash in C ends with a long listing, whose first line names the crash.
    crash = next((line for line in lines if line.startswith("Fatal Python error")), None)
    last = crash or (lines[-1] if lines else "")
    if returncode < 0:
        return _describe_signal(-returncode, last)
    return f"ended with status {returncode}" + (f": {last}" if last else ""), ""


def _describe_signal(number: int, last_line: str) -> tuple[str, str]:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return f"killed by {name}", KILLED
    return f"killed by {name}" + (f": {last_line}" if last_line else ""), ""
