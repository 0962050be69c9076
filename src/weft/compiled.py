"""The library of the CPU kernels in C++: compiled once for this machine where there is a compiler, kept in the cache.

Nothing here needs torch: the compiler can begin while the ranks still import it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from weft.facts.cache import cache_path

SOURCES = Path(__file__).parent / "kernels/native/cpp"
FLAGS = (
    *("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp-simd", "-std=c++17"),
    *("-pthread", "-fPIC", "-fvisibility=hidden"),
)
TYPES = {"bfloat16": "bf16", "float32": "float"}  # in C++
WIDEST_HEAD = 256  # as in paged.h: WIDEST
WIDEST_GROUP = 96  # as in tiles.h: QUERIES


def obstacle(dtype: str, head_dim: int, group: int) -> str | None:
    """Why these kernels cannot serve a model of this dtype, head_dim and query heads per KV head."""
    if dtype not in TYPES:
        return f"they know bfloat16 and float32, not {dtype}"
    if head_dim > WIDEST_HEAD or group > WIDEST_GROUP:
        return f"head_dim {head_dim} with {group} query heads per KV head is beyond {WIDEST_HEAD} and {WIDEST_GROUP}"
    return None


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
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    flags = (*FLAGS, f"-DWEFT_TYPE={TYPES[dtype]}", f"-DWEFT_NAME={dtype}")
    facts = (*sources, compiler, *flags, platform.machine(), _cpu())
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
            for left in folder.glob(f"{key}-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{key}-", dir=folder) as scratch:
                _compile(compiler, flags, Path(scratch)).replace(library)
    return library


def build_ahead(dtype: str) -> threading.Thread:
    """Begin to build, in a thread of its own. Whoever calls `build` waits for it, and hears why it could not."""

    def run() -> None:
        with contextlib.suppress(Exception):
            build(dtype)

    thread = threading.Thread(target=run, name="weft-compile", daemon=True)
    thread.start()
    return thread


def _compile(compiler: str, flags: Iterable[str], scratch: Path) -> Path:
    """The library, in `scratch`: its parts by as many compilers at once."""
    parts = {part: scratch / f"{part.stem}.o" for part in sorted(SOURCES.glob("*.cpp"))}
    _run([[compiler, *flags, "-c", str(part), "-o", str(made)] for part, made in parts.items()])
    library = scratch / "library.so"
    _run([[compiler, "-shared", "-pthread", *map(str, parts.values()), "-o", str(library)]])
    return library


def _run(commands: list[list[str]]) -> None:
    """All at once, to the end. Raises subprocess.SubprocessError where one fails; none outlives this process's exit."""
    running: list[subprocess.Popen[str]] = []

    def stop() -> None:
        for process in running:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # Of a compiler it is a child that works.
                    os.killpg(process.pid, signal.SIGKILL)

    atexit.register(stop)
    with contextlib.ExitStack() as after:
        after.callback(atexit.unregister, stop)
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            running.append(after.enter_context(process))
            after.callback(stop)
        for command, process in zip(commands, running, strict=True):
            words = process.communicate()[0]
            if process.returncode:
                lines = words.strip().splitlines() or [f"exit status {process.returncode}"]
                raise subprocess.SubprocessError(f"{command[0]} could not build them: {lines[0]}")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
