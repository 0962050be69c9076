"""The last lines of the logs of this user's servers: of the file or the journal that standard error goes to."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

TAIL_BYTES = 256 << 10
JOURNAL_LINES = 2000
JOURNAL_S = 10.0  # for journalctl's answer
# The beginning of a log line, as text or as JSON; the journal's own fields, and the name of a set's model, may come
# before.
LINE_START = re.compile(
    r"^(\S+ \S+ \S+: )?(\S+ \| )?"
    r'((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d |\{"time": ")'
)
PROMPT_LINE = re.compile(r"\brequest \S+: prompt ")  # of serving.service, with --enable-log-requests
LEFT_OUT = "(a line with a prompt is left out)"


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


def without_prompts(text: str, *, logs_prompts: bool = False) -> str:
    """A log without the lines of --enable-log-requests, and without their rest where the journal has cut them up.

    `logs_prompts` says that the server has this flag: then the log may begin in the middle of such a line.
    """
    kept = []
    hidden = logs_prompts or PROMPT_LINE.search(text) is not None
    for line in text.split("\n"):
        if PROMPT_LINE.search(line):
            hidden = True
            kept.append(LEFT_OUT)
        elif LINE_START.search(line):
            hidden = False
        if not hidden:
            kept.append(line)
    return "\n".join(kept)
