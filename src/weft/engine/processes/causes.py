"""Causes of failure, in the user's words, from an exception or from the exit of a process."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import Cause, EngineError, WeftError

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
OUT_OF_MEMORY_HINTS = {
    "load": "cut the model across more ranks with --tensor-parallel-size or --pipeline-parallel-size, "
    "or take a quantised checkpoint",
    "allocate": "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-batched-tokens",
    "step": "lower --max-num-batched-tokens or --max-num-seqs, or --gpu-memory-utilization",
}
STUCK = "its stack is printed above; weft hardware tests the GPUs and the links between them"
CANNOT_REACH = "cannot-reach"  # code of the error of a rank that does not find rank 0
KILLED = "unless it was killed by hand, the system was out of memory: see `dmesg`"


def cause_of(error: BaseException, rank: int, phase: str) -> Cause:
    """Return one line for the user. For a bug, print the stack trace to stderr too; advice needs none."""
    if isinstance(error, EngineError):
        return error.cause
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(words in text.lower() for words in OUT_OF_MEMORY):
        hint = OUT_OF_MEMORY_HINTS.get(phase, "")
        return Cause(rank=rank, phase=phase, code="out-of-memory", cause=text or "out of memory", hint=hint)
    if isinstance(error, WeftError):
        return Cause(rank=rank, phase=phase, code=error.code, cause=text)
    if not lost_peer(error):
        traceback.print_exception(error, file=sys.stderr)
    code = "peer-lost" if lost_peer(error) else "internal-error"
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Cause(rank=rank, phase=phase, code=code, cause=cause)


def lost_peer(error: BaseException) -> bool:
    """Return True if a rank fails only because it cannot reach another one, whose own failure may be the root cause."""
    return isinstance(error, ConnectionError) or (isinstance(error, WeftError) and error.code == CANNOT_REACH)


class ExitReason(NamedTuple):
    """The reason why a process ended: a Cause without rank and phase."""

    code: str
    cause: str
    hint: str = ""

    def of(self, rank: int, phase: str) -> Cause:
        """Return the Cause of the failure of this rank in this phase."""
        return Cause(rank=rank, phase=phase, code=self.code, cause=self.cause, hint=self.hint)


def describe_exit(returncode: int | None, stderr: str, *, ended: bool = False) -> ExitReason:
    """Return the reason why a process sent no last message; `stderr` is the end of its output.

    Without `returncode` it still runs, or it has `ended` with an unknown status.
    """
    if returncode is None and not ended:
        return ExitReason("connection-closed", "closed its connection")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any(line.startswith("Timeout (") for line in lines):  # faulthandler's: the process was stuck and ended itself
        return ExitReason("process-stuck", "was stuck and ended itself", STUCK)
    last_words = _last_words(lines)
    if returncode is None:
        text = "has ended, most likely killed; its exit status is not known, since its fork server was killed before"
        return ExitReason("process-ended", text + last_words)
    if returncode < 0:
        return _describe_signal(-returncode, last_words)
    if returncode == 0:  # as a child does whose parent is gone, for all that it knows
        return ExitReason("connection-closed", "ended because its connection to the parent process was closed")
    return ExitReason("process-ended", f"ended with status {returncode}{last_words}")


def _last_words(lines: Sequence[str]) -> str:
    """The last line of a process's output behind a colon, "" without any.

    A crash in C ends with a long listing, whose first line names the crash: that one counts.
    """
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    words = (crashes or list(lines[-1:]))[:1]
    return f": {words[0]}" if words else ""


def _describe_signal(number: int, last_words: str) -> ExitReason:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return ExitReason("process-killed", f"killed by {name}", KILLED)
    return ExitReason("process-killed", f"killed by {name}{last_words}")
