"""A process that reads traces: hundreds of megabytes of JSON would keep all threads of a server waiting."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec

from weft.errors import error_reason
from weft.monitor.trace_report import merge_traces, read_trace, report_traces

Work = Literal["report", "merge"]


def read_elsewhere(work: Work, files: Sequence[str]) -> tuple[bytes, str]:
    """The report of traces as JSON, or all of them as one compressed trace; and lines about unreadable traces.

    Raises OSError, also if no trace can be read.
    """
    command = [sys.executable, "-m", __name__, work, *files]
    ran = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    complaint = ran.stderr.decode(errors="replace").strip()
    if ran.returncode:
        raise OSError(complaint or f"the process that reads traces has ended with {ran.returncode}")
    return ran.stdout, complaint


def main(work: str, *files: str) -> int:
    """Write what `read_elsewhere` returns."""
    traces = []
    for file in files:
        try:
            traces.append(read_trace(file))
        except (OSError, ValueError, EOFError) as error:
            print(f"cannot read the trace {file}: {error_reason(error)}", file=sys.stderr)
    if not traces:
        return 1
    if work == "merge":
        sys.stdout.buffer.write(gzip.compress(json.dumps(merge_traces(traces)).encode(), compresslevel=1))
    else:
        sys.stdout.buffer.write(msgspec.json.encode(report_traces(traces)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
