"""Traces of a run in one archive of bounded size, which lies beside its results: those of less value make room."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ARCHIVE_BYTES = 15_000_000  # what a machine lent for an hour lets one file have
LEAST, MOST = 0, 9  # values


def keep_trace(options: dict[str, Any], name: str, trace: Path) -> str:
    """Compress `trace` into the archive options["traces"], and drop those of least value while it is too large.

    Returns a note: where the trace is, or that it was dropped. The archive is whole at any time; one process at a time
    may call this. `trace_value` is LEAST to MOST.
    """
    archive, value = Path(options["traces"]), int(options.get("trace_value", LEAST))
    assert LEAST <= value <= MOST, value
    member = f"{value}-{''.join(letter if letter.isalnum() else '-' for letter in name)}{trace.suffix}.gz"
    with TemporaryDirectory() as folder:
        kept = Path(folder)
        if archive.exists():
            with tarfile.open(archive) as old:
                old.extractall(kept, filter="data")
        (kept / member).write_bytes(gzip.compress(trace.read_bytes()))
        # The first character of a name is its value; of equal ones the earlier stay.
        left, room = [], ARCHIVE_BYTES
        for path in sorted(kept.iterdir(), key=lambda path: (-int(path.name[0]), path.stat().st_mtime_ns)):
            room -= path.stat().st_size + 1024  # and its header
            if room >= 0:
                left.append(path)
        partial = archive.with_suffix(".partial")
        with tarfile.open(partial, "w") as new:
            for path in left:
                new.add(path, path.name)
        os.replace(partial, archive)
        return f"{member} in {archive.name}" if kept / member in left else "dropped: others are worth more"
