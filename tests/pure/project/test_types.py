"""Types hold for the newest Python as well: `scripts/check` has the oldest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.14"])
def test_mypy_finds_nothing(version: str) -> None:
    command = [sys.executable, "-m", "mypy", "--python-version", version]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
