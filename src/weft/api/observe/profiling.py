"""The last profile of a server: its traces, their report, and all ranks on one time axis."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weft.monitor.price import workload_of
from weft.monitor.trace_reader import read_elsewhere

if TYPE_CHECKING:
    from weft.monitor.history import History
    from weft.planner.execution.forecast import Forecast

log = logging.getLogger("weft.serving")


class LastProfile:
    """Paths of the traces that a server has started last, as its ranks have reported them: no client names any."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()
        self._reading = threading.Lock()  # one process at a time: each takes gigabytes
        self._report_made: Any = None
        self._reported: tuple[tuple[str, int], ...] = ()  # files of that report, and when each was written

    def begin(self, files: Sequence[str]) -> None:
        """Note a new profile."""
        self.files = tuple(files)

    @property
    def written(self) -> list[str]:
        """The complete traces. Traces of other machines are never found here."""
        return [file for file in self.files if Path(file).exists()]

    def describe(self, history: History, forecast: Forecast | None, *, partial: bool) -> dict[str, Any]:
        """Files, and once all are complete their report, with the planner's shares of a step; takes seconds.

        With `partial` the report covers the complete files.
        """
        written = self.written
        complete = partial or len(written) == len(self.files)
        return {
            "files": list(self.files),
            "missing": [file for file in self.files if file not in written],
            "report": self._report(written) if written and complete else None,
            "predicted": predicted_shares(history, forecast),
        }

    def _report(self, files: Sequence[str]) -> Any:
        """The report of traces, made once; None if no trace can be read."""
        with self._reading:
            try:
                state = tuple((file, os.stat(file).st_mtime_ns) for file in files)
                if state != self._reported:
                    content, warning = read_elsewhere("report", files)
                    self._report_made, self._reported = msgspec.json.decode(content), state
                    if warning:
                        log.warning("%s", warning)
                return self._report_made
            except OSError as error:
                log.warning("%s", error)
                return None

    def merged(self) -> bytes:
        """All complete traces on one time axis, as compressed JSON. Raises OSError."""
        with self._reading:
            return read_elsewhere("merge", self.written)[0]


def predicted_shares(history: History, forecast: Forecast | None) -> dict[str, float] | None:
    """The planner's shares of a step under the load of now; None without a prediction.

    Sampling, scheduling and pauses between steps are one figure there: `overhead`.
    """
    if forecast is None or not forecast.tells_speed:
        return None
    work = workload_of(history)
    step = forecast.speed(work.input_len, work.output_len, work.concurrency or 1).step
    whole = step.total or 1.0
    return {
        "attention": step.attention / whole,
        "products": (step.matrices + step.experts) / whole,
        "communication": step.links / whole,
        "overhead": step.overhead / whole,
    }
