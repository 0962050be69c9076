"""OpenTraces: the profile that a caller has begun, and its files, which an engine that closes must not lose."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from weft.engine.client.control import trace_paths
from weft.engine.core.commands import Profile, Replies, TraceFile
from weft.formatting import counted
from weft.logs import event_fields

log = logging.getLogger("weft")

WRITE_S = 60.0  # seconds for the ranks to write their traces: 20 steps take below one, 1,000 of a large model many
POLL_S = 0.05
END = Profile(0, "")  # ends the trace that runs


class OpenTraces:
    """The files of the last profile, and its steps. Nothing is open before `begin`, and after `end`.

    With `elsewhere` ranks run on other machines, whose files cannot be seen here.
    """

    def __init__(self, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._steps = 0
        self._files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._files)

    def begin(self, steps: int, replies: Replies) -> list[str]:
        """Note a profile of `steps` steps, or the end of a profile if 0; return the files by the ranks' replies."""
        files = trace_paths(replies)
        self._steps, self._files = (steps, tuple(files)) if steps else (0, ())
        return files

    def end(self, replies: Replies) -> None:
        """Wait until the files are written, of which the ranks have just been told to end; log the number of steps.

        `replies` are those to END.
        """
        steps = max((reply.steps for reply in replies if isinstance(reply, TraceFile)), default=0) or self._steps
        wanted, files, self._files = self._steps, self._files, ()
        deadline = time.monotonic() + WRITE_S
        while missing := [file for file in files if not Path(file).exists()]:
            if self._elsewhere:
                break
            if time.monotonic() > deadline:
                log.error("no trace was written within %g s: %s", WRITE_S, ", ".join(missing))
                return
            time.sleep(POLL_S)
        short = steps < wanted
        fewer = f" of the {wanted} that were asked for: the engine ran no more" if short else ""
        log.log(
            logging.WARNING if short else logging.INFO,
            "the trace has %s%s: %s",
            counted(steps, "step"),
            fewer,
            ", ".join(files),
            extra=event_fields("trace-ended", steps=steps, wanted=wanted, files=len(files)),
        )
