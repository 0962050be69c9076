"""A compiled library of the CPU kernels: compiler, flags, place in the cache, digest and loading."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.cache import cache_path, distrust_reason, install_cache_file, write_cache_file
from weft.logs import event_fields
from weft.machine.native.structures import CONSTANTS, SIZE, STRUCTURES

logger = logging.getLogger("weft")

SOURCES = Path(__file__).with_name("cpp")
FLAGS = (
    *("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp-simd", "-std=c++17"),
    *("-pthread", "-fPIC", "-fvisibility=hidden"),
)
# For 256-bit vectors on a CPU that has wider ones, and without its tiles.
NARROW_FLAGS = ("-DWEFT_NARROW", "-mno-avx512f")
CPP_TYPES = {"bfloat16": "bf16", "float32": "float"}  # dtypes of activations, and their types in C++
DEFAULT_DTYPE = "bfloat16"  # dtype of activations on a CPU unless --dtype says otherwise


@dataclass(frozen=True)
class BuildRecipe:
    """A library's compiler and flags on this machine. `key` is the digest of the sources, flags, CPU features
    and the compiler's file, and `path` is the library's place in the cache."""

    compiler: str
    flags: tuple[str, ...]
    key: str
    path: Path


def find_compiler() -> str:
    """Path of a C++ compiler. Raises FileNotFoundError without one."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++")
    return compiler


def build_recipe(dtype: str, *, narrow: bool = False) -> BuildRecipe:
    """The recipe for activations of a dtype of CPP_TYPES; `narrow` is with NARROW_FLAGS.

    Raises FileNotFoundError without a compiler.
    """
    compiler = find_compiler()
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    flags = (*FLAGS, f"-DWEFT_TYPE={CPP_TYPES[dtype]}", f"-DWEFT_NAME={dtype}", *(NARROW_FLAGS if narrow else ()))
    ingredients = (*sources, _file_version(compiler), *flags, platform.machine(), _cpu_features())
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:20]
    return BuildRecipe(compiler, flags, key, cache_path() / "kernels" / f"{dtype}-{key}.so")


def install_library(built: Path, path: Path) -> None:
    """Move a library that was built to its place in the cache, with its digest next to it. Raises OSError."""
    built.chmod(0o700)
    write_cache_file(digest_path(path), _digest(built).encode())
    install_cache_file(built, path)


def is_intact(path: Path) -> bool:
    """Return True if the library's digest is next to it and holds. Loading one that is cut short would end the process
    by SIGBUS."""
    try:
        return digest_path(path).read_bytes() == _digest(path).encode()
    except OSError:
        return False


def open_library(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded; all callers load it here.

    Raises OSError, in one line, if another user could have written it, if its digest does not hold, if the system
    cannot load it, or if its structures or constants differ from `structures.py`.
    """
    if reason := objection(path):
        raise OSError(reason)
    if not is_intact(path):
        raise OSError(f"{path} is damaged: its digest does not hold")
    library = ctypes.CDLL(str(path))
    check_abi(library, path)
    return library


def objection(path: Path) -> str | None:
    """Reason not to load the library at `path`, which need not exist: another user could have written the
    library or its digest file."""
    return distrust_reason(path) or distrust_reason(digest_path(path))


def digest_path(path: Path) -> Path:
    """The file that holds a library's SHA-256 digest, in hexadecimal."""
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def warn_once(reason: str) -> None:
    logger.warning("the cached CPU kernels are not loaded: %s", reason, extra=event_fields("cpu-kernels-not-loaded"))


def _file_version(path: str) -> str:
    """A program's path, size and time of change: another version in the same place gives another text."""
    status = os.stat(path)
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def _cpu_features() -> str:
    """The CPU's model and instruction sets, which the code of -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


class AbiEntry(ctypes.Structure):
    """`AbiEntry` of abi.h: a name, and the size, offset in bytes or value that goes by it."""

    _fields_ = (("name", ctypes.c_char_p), ("value", SIZE))


def check_abi(library: ctypes.CDLL, path: Path) -> None:
    """Raise OSError, in one line, unless the library at `path` has the structures and constants of `structures.py`."""
    try:
        theirs = read_abi(library)
    except AttributeError:
        reason = "it has no weft_abi"
    else:
        mismatch = find_mismatch(theirs)
        if mismatch is None:
            return
        reason = mismatch
    raise OSError(f"{path} does not fit this version of Weft: {reason}; delete that file to have it built again")


def read_abi(library: ctypes.CDLL) -> dict[str, int]:
    """Sizes, offsets and constants by the names that the library gives them. Raises AttributeError without weft_abi."""
    function = library.weft_abi
    function.argtypes, function.restype = [ctypes.POINTER(SIZE)], ctypes.POINTER(AbiEntry)
    count = SIZE()
    entries = function(ctypes.byref(count))
    return {entries[i].name.decode(): entries[i].value for i in range(count.value)}


def expected_abi() -> dict[str, int]:
    """Sizes, offsets and constants of `structures.py`, by the names that the library gives them."""
    expected = {}
    for name, structure in STRUCTURES.items():
        expected[name] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            expected[f"{name}.{field}"] = getattr(structure, field).offset
    return expected | {name: SIZE(value).value for name, value in CONSTANTS.items()}


def find_mismatch(theirs: Mapping[str, int]) -> str | None:
    """First structure, field or constant that the library and `structures.py` have differently, with both numbers."""
    ours = expected_abi()
    # Fields first: they tell more than the sizes of their structures.
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: ("." not in name, name)):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'missing')} in the library and {ours.get(name, 'missing')} in Python"
    return None
