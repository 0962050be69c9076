"""The library of the CPU kernels in C++: how it is made, where it is kept, and what its products are told of a matrix.

Whoever has numbers in memory can call it, with torch or without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from weft.facts.cache import cache_path

SOURCES = Path(__file__).parents[1] / "kernels/native/cpp"
FLAGS = (
    *("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp-simd", "-std=c++17"),
    *("-pthread", "-fPIC", "-fvisibility=hidden"),
)
TYPES = {"bfloat16": "bf16", "float32": "float"}  # in C++
USUAL = "bfloat16"  # what a CPU computes in unless it is told
PANEL = 32  # as in dense.h
LOWEST = {"middle": 0, "zero": 1, "minimum": 2}  # as in quantised.h: Lowest
POINTER, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Matrix(ctypes.Structure):
    """struct Matrix of matrix.h."""

    _fields_ = (
        *((name, SIZE) for name in ("bits", "rows", "cols")),
        *((name, POINTER) for name in ("data", "scales", "lowest", "bias")),
        *((name, SIZE) for name in ("group", "lacking", "kind")),
    )


@dataclass(frozen=True)
class Recipe:
    """How the library for a dtype of activations is made here, and the `path` in the cache that it has then."""

    compiler: str
    flags: tuple[str, ...]
    key: str
    path: Path


def recipe(dtype: str) -> Recipe:
    """Of a dtype of TYPES. Raises FileNotFoundError without a compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++")
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    flags = (*FLAGS, f"-DWEFT_TYPE={TYPES[dtype]}", f"-DWEFT_NAME={dtype}")
    facts = (*sources, compiler, *flags, platform.machine(), _cpu())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    return Recipe(compiler, flags, key, cache_path() / "kernels" / f"{dtype}-{key}.so")


def found() -> str | None:
    """The library that models usually run with: its path, "" where it was not built yet, None without a compiler."""
    try:
        path = recipe(USUAL).path
        return str(path) if path.exists() else ""
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError):  # RuntimeError: there is no home, and so no cache
        return ""


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
