"""A process that answers each line of its input with a line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLOSE_S = 30.0


class Program:
    """A process that answers lines with lines. Its log goes to a file."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def read_line(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended:\n{self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read_line()

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
