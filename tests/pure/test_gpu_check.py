"""scripts/gpu_check, as far as it goes without a GPU: with a Python that does nothing but say what it was asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("tests", "speed", "ablations", "attention", "products", "sampling", "parity")
# The model's benchmark without graphs fails, as does one of the tests.
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$ASKED"
case "$*" in
- | "- "*) cat >/dev/null; echo "{}" ;;
*eager*) exit 3 ;;
*test_tuning*) echo "FAILED tests/gpu/test_tuning_cuda.py::test_it - boom"; exit 1 ;;
*) echo "done: $*" ;;
esac
"""


def run(part: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """What became of a part, and what Python was asked for."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/gpu_check", folder / "scripts")
    (folder / "python3").write_text(PYTHON)
    (folder / "python3").chmod(0o755)
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "ASKED": str(folder / "asked"),
        "RESULTS": str(folder / "results"),
        "TMPDIR": str(folder),
    }
    done = subprocess.run([folder / "scripts/gpu_check", part], env=env, capture_output=True, text=True)
    return done, (folder / "asked").read_text()


@pytest.mark.skipif(os.name != "posix" or not shutil.which("timeout"), reason="needs the command timeout")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_keeps_what_it_found_and_names_what_failed(part: str, tmp_path: Path) -> None:
    done, asked = run(part, tmp_path)
    bad = [line for line in asked.splitlines() if "eager" in line or "test_tuning" in line]
    assert done.returncode == bool(bad), done.stderr
    assert done.stderr.count("gpu_check: failed") == len(bad)
    assert ("FAILED" in done.stdout) == (part == "tests")
    kept = "".join(file.read_text() for file in (tmp_path / "results").iterdir())
    good = [line for line in asked.splitlines() if line not in bad and not re.match(r"-( |$)", line)]
    assert good and all(f"done: {line}" in kept for line in good), kept
    assert len([*(tmp_path / "results").iterdir()]) <= 8


def test_every_gpu_test_is_in_a_part() -> None:
    told = (ROOT / "scripts/gpu_check").read_text()
    assert {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")} == set(re.findall(r"test_\w+_cuda\.py", told))
    assert all(f"\n{part})" in told for part in PARTS)
