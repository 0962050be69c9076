"""Warnings of a C++ compiler for the CPU kernels, and programs that test their headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from weft.machine.native.library import CPP_TYPES, FLAGS, SOURCES

WARNINGS = ("-Wall", "-Werror", "-Wno-psabi")  # the last: GCC on how vectors are passed, which no other code sees


def compiler() -> str:
    """Its path; without one the test is skipped."""
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def has_no_warnings(dtype: str) -> None:
    """The library of the CPU kernels for a dtype, as it is compiled for this machine."""
    names = (f"-DWEFT_TYPE={CPP_TYPES[dtype]}", f"-DWEFT_NAME={dtype}")
    command = [compiler(), *FLAGS, *names, *WARNINGS, "-fsyntax-only", *SOURCES.glob("*.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def passes(name: str, folder: Path) -> None:
    """Build `name`.cpp in a folder and run it; it prints what is wrong, and fails then."""
    program, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    command = [compiler(), "-std=c++17", "-O1", "-pthread", *WARNINGS, "-I", SOURCES, source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
