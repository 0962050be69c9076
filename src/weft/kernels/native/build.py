"""Building the C++ kernels: compiled once for this machine where there is a compiler, kept in the cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from weft.facts.cache import cache_path

SOURCES = Path(__file__).with_name("cpp")
FLAGS = (
    *("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-std=c++20"),
    *("-shared", "-fPIC", "-fvisibility=hidden"),
)


TYPES = {"bfloat16": "bf16", "float32": "float"}  # in C++


@functools.cache
def build(dtype: str) -> Path:
    """The library for activations of a dtype of TYPES, from the cache or made now, which takes a compiler some seconds;
    one process builds, others wait.

    Raises FileNotFoundError without a compiler, OSError where the cache cannot be written and
    subprocess.SubprocessError where the compiler fails.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++")
    # torch brings its own OpenMP; a second one would mean a second pool of threads on the same cores.
    openmp = sorted(str(p) for p in Path(torch.__file__).parent.glob("lib/lib*omp*.so*"))
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    flags = (*FLAGS, f"-DWEFT_TYPE={TYPES[dtype]}", f"-DWEFT_NAME={dtype}")
    facts = (*sources, compiler, *flags, *openmp, torch.__version__, platform.machine(), _cpu())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    folder = cache_path() / "kernels"
    library = folder / f"{dtype}-{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{key}.lock").open("w")
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}); let XDG_CACHE_HOME be one that can") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / "native.so"
                command = [compiler, *flags, str(SOURCES / "native.cpp"), *openmp, "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                    raise subprocess.SubprocessError(f"{compiler} could not build them: {lines[0]}")
                made.replace(library)
    return library


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
