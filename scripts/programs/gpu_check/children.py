"""Child processes of a part: measurements, pytest, and other programs, each with a limit in seconds and a log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from scripts.programs.gpu_check.card import ROOT
from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.ranks import last_line

# Without the project's pytest options and its conftest.py: they need plugins that a machine lent for an hour lacks.
PYTEST = (
    "-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests/gpu"), "-p", "no:cacheprovider",
    "--continue-on-collection-errors", "--tb=short",
)  # fmt: skip
PYTHON = (sys.executable, "-P")


class ChildError(RuntimeError):
    """A child that failed, with its last line."""


class CutError(ChildError):
    """A child that was ended because its time was up."""


class Children:
    """Starts children and keeps what they print in `folder`/NAME.log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def figures(self, name: str, options: Options, log: str, limit_s: float) -> Iterator[Figure]:
        """Figures of a measurement as they come. Raises ChildError."""
        command = [*PYTHON, "-m", "scripts.programs.gpu_check.work", name, json.dumps(options)]
        for line in self.lines(command, log, limit_s):
            if line.startswith('{"figure"'):
                yield Figure(**json.loads(line)["figure"])

    def tests(self, files: Sequence[str], selection: str, log: str, limit_s: float) -> tuple[int, list[str]]:
        """Exit status and output of pytest on `files` with -k `selection`. Raises CutError."""
        arguments = [*files, *(["-k", selection] if selection else [])]
        return self.finished([*PYTHON, "-m", "pytest", *PYTEST, "-v", *arguments], log, limit_s)

    def finished(self, command: Sequence[str], log: str, limit_s: float) -> tuple[int, list[str]]:
        """Exit status and output of a program. Raises CutError."""
        output: list[str] = []
        try:
            for line in self.lines(command, log, limit_s):
                output.append(line)
        except CutError:
            raise
        except ChildError:
            return 1, output
        return 0, output

    def lines(self, command: Sequence[str], log: str, limit_s: float) -> Iterator[str]:
        """Lines that a program prints, into `log` too. Raises ChildError if it fails; ends all that it started."""
        with (self.folder / f"{log}.log").open("a", encoding="utf-8") as file:
            print("$", *command, file=file, flush=True)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            cut = threading.Event()
            watch = threading.Timer(limit_s, end_group, (process.pid, cut))
            watch.start()
            last = ""
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", file=file, flush=True)
                    last = line.rstrip("\n") or last
                    yield line.rstrip("\n")
                status = process.wait()
            finally:
                watch.cancel()
                end_group(process.pid)
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        if cut.is_set():
            raise CutError(f"ended after {limit_s:.0f} s, at: {last_line(last)}")
        if status:
            raise ChildError(f"ended with {status}: {last_line(last)}")


def end_group(process: int, cut: threading.Event | None = None) -> None:
    """Kill a process and all of its session that are left; `cut` is set first."""
    if cut is not None:
        cut.set()
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
