"""The last lines of the logs of this user's servers: of the file or the journal that standard error goes to."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

TAIL_BYTES = 256 << 10
JOURNAL_LINES = 2000
JOURNAL_S = 10.0  # for journalctl's answer


def process_log(pid: int, root: Path = Path("/")) -> str | None:
    """The end of a process's log; None if its standard error is neither a file nor the journal."""
    descriptor = root / "proc" / str(pid) / "fd" / "2"
    try:
        kind = descriptor.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(kind):
        return file_tail(descriptor)
    return journal_tail(pid) if stat.S_ISSOCK(kind) else None


def file_tail(path: Path) -> str | None:
    """The last TAIL_BYTES of a file from the beginning of a line on; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
    return text.partition("\n")[2] if size > TAIL_BYTES else text


def journal_tail(pid: int) -> str | None:
    """The last lines that systemd's journal has of a process; None without one."""
    program = shutil.which("journalctl")
    if program is None:
        return None
    words = [program, "--no-pager", "--quiet", f"--lines={JOURNAL_LINES}", "--output=short-iso", f"_PID={pid}"]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=JOURNAL_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout or None
