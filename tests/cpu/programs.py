"""Programs in C++ that test the headers of the CPU kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from weft.compiled import SOURCES


def passes(name: str, folder: Path) -> None:
    """Build `name`.cpp in a folder and run it; it prints what is wrong, and fails then."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    command = [compiler, "-std=c++17", "-O1", "-pthread", "-Wall", "-I", SOURCES, source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
