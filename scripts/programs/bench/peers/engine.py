"""An engine in a process of its own: started, asked, its memory looked at, ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ENGINES = Path(__file__).parent / "engines"


class Ended(Exception):
    """An engine that could not be started, or ended in its work; the message is the last line that it said."""


@dataclass(frozen=True)
class Round:
    """One run: seconds of each request from the submission of all, and of all of them. `new` is the number of tokens of
    every answer, or a list of them."""

    first_s: list[float]
    last_s: list[float]
    seconds: float
    new: int | list[int]
    prompt_tokens: int

    def figure(self, kind: str) -> float:
        """Tokens per second, as `Work.figure` says; for `first` milliseconds."""
        if kind == "first":
            return 1000 * median(self.first_s)
        if kind == "decode":
            spans = zip(self.lengths, self.first_s, self.last_s, strict=True)
            return median((new - 1) / (last - first) for new, first, last in spans)
        tokens = self.prompt_tokens if kind == "prompt" else sum(self.lengths)
        return tokens / self.seconds

    @property
    def lengths(self) -> list[int]:
        return self.new if isinstance(self.new, list) else [self.new] * len(self.first_s)


class Engine:
    """`command` is an interpreter, a script of engines/ and its arguments. `start_s` is from the start of the process
    to its first token."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.start_s, self.threads = ready["ready"] - began, ready["threads"]

    def answer(self, prompts: list[list[int]], new: int | list[int]) -> Round:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        tokens = sum(map(len, prompts))
        return Round(found["first_s"], found["last_s"], found["seconds"], new, tokens)

    def memory_bytes(self) -> int:
        """Memory of the process and of all that it started: each shared page counts once (PSS)."""
        total = 0
        for process in tree(self._process.pid):
            try:
                found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
            except OSError:  # it has ended meanwhile
                continue
            total += int(found[1]) * 1024 if found else 0
        return total

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        raise Ended(f"{self.name} ended with {self._process.returncode}: {said[-1][:300] if said else 'no word'}")

    def close(self) -> None:
        """End it with all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


def tree(process: int) -> list[int]:
    """A process, its children, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [process]
    for each in found:
        found += parents.get(each, [])
    return found
