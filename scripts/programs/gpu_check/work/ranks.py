"""Rank processes of the measurements with several ranks on one card."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence


class RankError(RuntimeError):
    """A rank that failed or did not end, with its last line."""


def run_ranks(commands: Sequence[Sequence[str]], environment: Mapping[str, str], limit_s: float) -> list[str]:
    """Run one process per rank to its end and return what each printed. Raises RankError, and leaves none behind."""
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        for command in commands
    ]
    deadline = time.monotonic() + limit_s
    outputs = []
    try:
        for rank, process in enumerate(processes):
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RankError(f"rank {rank} did not end within {limit_s:.0f} s") from None
            if process.returncode:
                raise RankError(f"rank {rank} ended with {process.returncode}: {last_line(output)}")
            outputs.append(output)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return outputs


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no word"


def module_command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]
