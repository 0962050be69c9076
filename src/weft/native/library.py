"""The library of the CPU kernels in C++: how it is made, where it is kept, and what its products are told of a matrix.

Whoever has numbers in memory can call it, with torch or without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from weft.cache import cache_path, distrust, install, write

logger = logging.getLogger("weft")

SOURCES = Path(__file__).parents[1] / "native/cpp"
FLAGS = (
    *("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp-simd", "-std=c++17"),
    *("-pthread", "-fPIC", "-fvisibility=hidden"),
)
CPP_TYPES = {"bfloat16": "bf16", "float32": "float"}  # in C++
DEFAULT_DTYPE = "bfloat16"  # what a CPU computes in unless it is told
PANEL = 32  # as in dense.h
LOWEST_KINDS = {"middle": 0, "zero": 1, "minimum": 2}  # as in quantised.h: Lowest
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
    """Of a dtype of CPP_TYPES. Raises FileNotFoundError without a compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++")
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    flags = (*FLAGS, f"-DWEFT_TYPE={CPP_TYPES[dtype]}", f"-DWEFT_NAME={dtype}")
    facts = (*sources, compiler, *flags, platform.machine(), _cpu())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    return Recipe(compiler, flags, key, cache_path() / "kernels" / f"{dtype}-{key}.so")


def built_library() -> str | None:
    """The library that models usually run with: its path, "" where it was not built yet or may not be loaded, None
    without a compiler."""
    try:
        path = recipe(DEFAULT_DTYPE).path
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError):  # RuntimeError: there is no home, and so no cache
        return ""
    if not path.exists():
        return ""
    if reason := objection(path):
        _refuse_once(reason)
        return ""
    return str(path) if intact(path) else ""


def keep(made: Path, path: Path) -> None:
    """Put a library that was built into its place in the cache, with its digest beside it. Raises OSError."""
    made.chmod(0o700)
    write(digest_path(path), _digest(made).encode())
    install(made, path)


def intact(path: Path) -> bool:
    """Whether a library is what was built: its digest is beside it and holds. To load one that is cut short would end
    the process by SIGBUS."""
    try:
        return digest_path(path).read_bytes() == _digest(path).encode()
    except OSError:
        return False


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, ready to be called. Everybody who loads one does it here. Raises OSError, in one line, if
    somebody else could have written it, if its digest does not hold, and if the system cannot load it."""
    if reason := objection(path):
        raise OSError(reason)
    if not intact(path):
        raise OSError(f"{path} is damaged: its digest does not hold")
    return ctypes.CDLL(str(path))


def objection(path: Path) -> str | None:
    """Reason not to run the library at `path`, which need not exist: somebody else could have written it, or its
    digest."""
    return distrust(path) or distrust(digest_path(path))


def digest_path(path: Path) -> Path:
    """The file that holds a library's SHA-256 digest, in hexadecimal."""
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _refuse_once(reason: str) -> None:
    logger.warning("the CPU kernels of the cache are not loaded: %s", reason)


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
