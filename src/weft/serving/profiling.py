"""The last profile of a server: its traces, their report, and all ranks on one time axis."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import error_reason
from weft.monitor.price import workload_of
from weft.monitor.trace_report import merge_traces, read_trace, report_traces

if TYPE_CHECKING:
    from weft.monitor.history import History
    from weft.planner.forecast import Forecast

log = logging.getLogger("weft.serving")


class LastProfile:
    """Paths of the traces that a server has started last, as its ranks have told them: no client names any."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()

    def begin(self, files: Sequence[str]) -> None:
        """Note a new profile."""
        self.files = tuple(files)

    @property
    def written(self) -> list[str]:
        """The traces that are complete. Those of other machines are never found here."""
        return [file for file in self.files if Path(file).exists()]

    def describe(self, history: History, forecast: Forecast | None, *, partial: bool) -> dict[str, Any]:
        """Files, and once all are complete their report, beside the planner's shares of a step; takes seconds.

        With `partial` the report is of those that are complete.
        """
        written, traces = self.written, []
        for file in written if partial or len(written) == len(self.files) else ():
            try:
                traces.append(read_trace(file))
            except (OSError, ValueError) as error:
                log.warning("cannot read the trace %s: %s", file, error_reason(error))
        return {
            "files": list(self.files),
            "missing": [file for file in self.files if file not in written],
            "report": msgspec.to_builtins(report_traces(traces), str_keys=True) if traces else None,
            "predicted": predicted_shares(history, forecast),
        }

    def merged(self) -> bytes:
        """All complete traces on one time axis, as compressed JSON."""
        content = json.dumps(merge_traces([read_trace(file) for file in self.written]))
        return gzip.compress(content.encode(), compresslevel=1)


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
