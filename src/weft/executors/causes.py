"""Causes: what an exception, or the end of a process, says to the user."""

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
STUCK = "where it was is printed above; weft hardware tests what the GPUs and their links really do"
KILLED = "if nobody killed it, the system was out of memory: `dmesg` tells"


def cause_of(error: BaseException, rank: int, phase: str) -> Cause:
    """One line for the user. A bug's stack trace goes to stderr as well; an error that is advice needs none."""
    if isinstance(error, EngineError):
        return error.cause
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(words in text.lower() for words in OUT_OF_MEMORY):
        return Cause(rank, phase, text or "out of memory", OUT_OF_MEMORY_HINTS.get(phase, ""))
    if isinstance(error, WeftError):
        return Cause(rank, phase, text)
    if not lost_peer(error):
        traceback.print_exception(error, file=sys.stderr)
    return Cause(rank, phase, f"{type(error).__name__}: {text}" if text else type(error).__name__)


def lost_peer(error: BaseException) -> bool:
    """Whether a rank fails only because it can no longer reach another: that other one is the root cause."""
    return isinstance(error, ConnectionError)


def describe_exit(returncode: int | None, words: str) -> tuple[str, str]:
    """Cause and hint for a process that ended without a word of its own; `words` is the end of its stderr."""
    if returncode is None:
        return "closed its connection", ""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if any(line.startswith("Timeout (") for line in lines):  # of faulthandler: it came no further, and knew it
        return "came no further and ended itself", STUCK
    # A crash in C ends with a long listing: its first line says what it was.
    last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
    if returncode < 0:
        number = -returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = KILLED if number == signal.SIGKILL else ""
        return f"killed by {name}" + (f": {last}" if last and not hint else ""), hint
    return f"ended with status {returncode}" + (f": {last}" if last else ""), ""
