"""Compilation of the CPU kernels in C++: once for this machine if it has a compiler, kept in the cache.

Nothing here needs torch: compilation can begin while the ranks still import it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from weft.cache import WAY_OUT, make_private, try_lock
from weft.logs import event_fields
from weft.machine.native import library
from weft.machine.native.library import CPP_TYPES, SOURCES, BuildRecipe
from weft.machine.native.prebuilt import TARGETS, CpuTarget, find_prebuilt, library_path, target_flags

REPORT_AFTER_S = 10.0  # seconds of waiting for another process's compiler
PATIENCE_S = 60.0  # seconds with another process's compiler: if it was stopped, it would never end
COMPILER_S = 600.0  # time limit of our own compiler
POLL_S = 0.02

logger = logging.getLogger("weft")
_building = threading.Lock()  # one thread of this process
compiling = threading.Event()  # set while this process compiles, or waits for another that does


@functools.cache
def build_library(dtype: str, narrow: bool = False) -> Path:
    """Path of the library for activations of a dtype of CPP_TYPES: prebuilt, from the cache, or compiled now.

    A `narrow` one keeps to 256-bit vectors.

    One process compiles while others wait. A process that waits for longer than PATIENCE_S compiles as well. In
    whatever order they finish, the file is always a whole one. A damaged file is built again.

    Raises FileNotFoundError without a compiler, OSError if the cache cannot be written or could have been written by
    other users, and subprocess.SubprocessError if the compiler fails.
    """
    if prebuilt := find_prebuilt(dtype, narrow=narrow):
        return prebuilt
    recipe = library.build_recipe(dtype, narrow=narrow)
    path = recipe.path
    with _building, _noted(compiling):
        _make_folder(path.parent)
        if reason := library.objection(path):
            raise OSError(reason)
        for turn in itertools.count():
            if library.is_intact(path):
                return path
            lock = path.parent / f"{recipe.key}.{turn}.lock"
            with _hold_lock(lock, path) as held:
                if held and not library.is_intact(path):
                    _build_locked(recipe, lock)
                    break
    if not library.is_intact(path):
        raise OSError(f"{path} was built, but the file does not hold what was written: check the disk, {WAY_OUT}")
    return path


@functools.cache
def load_library(dtype: str, narrow: bool = False) -> ctypes.CDLL:
    """The library for a dtype of CPP_TYPES, loaded into this process. Raises what `build_library` and
    `library.open_library` raise."""
    return library.open_library(build_library(dtype, narrow))


def build_ahead(dtype: str, narrow: bool = False) -> threading.Thread:
    """Begin to build, in a new thread. A later `build_library` waits for it, and raises what made it fail."""

    def build_quietly() -> None:
        with contextlib.suppress(Exception):
            build_library(dtype, narrow)

    thread = threading.Thread(target=build_quietly, name="weft-compile", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _noted(event: threading.Event) -> Iterator[None]:
    event.set()
    try:
        yield
    finally:
        event.clear()


def _build_locked(recipe: BuildRecipe, lock: Path) -> None:
    """Build the library while this process holds the `lock`; a damaged one is replaced."""
    folder = recipe.path.parent
    if recipe.path.exists():
        logger.warning(
            "The CPU kernels in %s are damaged and are built again.",
            recipe.path,
            extra=event_fields("cpu-kernels-damaged", path=str(recipe.path)),
        )
    for leftover in folder.glob(f"{lock.stem}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{lock.stem}-", dir=folder) as scratch:
        library.install_library(compile_library(recipe.compiler, recipe.flags, Path(scratch)), recipe.path)


def _make_folder(folder: Path) -> None:
    try:
        make_private(folder)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> OSError:
    return OSError(f"{folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a directory that can")


@contextlib.contextmanager
def _hold_lock(path: Path, awaited: Path) -> Iterator[bool]:
    """Hold the lock file `path`, which the system frees if its holder dies, and yield True.

    Yields False, without the lock, if another process built `awaited` in that time, or has held the lock for longer
    than PATIENCE_S.
    """
    try:
        lock = path.open("a+")
    except OSError as error:
        raise _not_writable(path.parent, error) from error
    with lock:
        held = _wait_for_lock(lock.fileno(), path, awaited)
        if held:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}")
            lock.flush()
        yield held


def _wait_for_lock(lock: int, path: Path, awaited: Path) -> bool:
    """Return True once this process has the lock, False if that is given up; see `_hold_lock`."""
    began, warned = time.monotonic(), False
    while not try_lock(lock):
        waited = time.monotonic() - began
        if waited > PATIENCE_S:
            logger.warning(
                "The CPU kernels are compiled again: %s did not finish in %.0f s.", _lock_holder(path), waited
            )
            return False
        if library.is_intact(awaited):
            return False
        if waited > REPORT_AFTER_S and not warned:
            warned = True
            logger.warning(
                "Waiting for the CPU kernels, which %s compiles (it holds %s); end that process if it hangs, or wait: "
                "in %.0f s they are compiled here.",
                *(_lock_holder(path), path, PATIENCE_S - waited),
            )
        time.sleep(POLL_S)
    return True


def _lock_holder(lock: Path) -> str:
    return lock.read_text() or "another process"  # that has not signed yet


def compile_library(compiler: str, flags: Iterable[str], scratch: Path) -> Path:
    """Compile the sources into a library in `scratch`, one compiler per source, all at once."""
    objects = {source: scratch / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
    _run_all([[compiler, *flags, "-c", str(source), "-o", str(object)] for source, object in objects.items()])
    linked = scratch / "library.so"
    _run_all([[compiler, "-shared", "-pthread", *map(str, objects.values()), "-o", str(linked)]])
    return linked


def _run_all(commands: list[list[str]]) -> None:
    """Run the commands at the same time, to their end; none outlives this process. Raises subprocess.SubprocessError if
    one fails."""
    running: list[subprocess.Popen[str]] = []

    def stop() -> None:
        for process in running:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # The group: a compiler works in a child process.
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
            _wait_for(command[0], process)


def _wait_for(compiler: str, process: subprocess.Popen[str]) -> None:
    """Wait for a compiler. Raises subprocess.SubprocessError, with the line that names the cause, if it fails."""
    try:
        output = process.communicate(timeout=COMPILER_S)[0]
    except subprocess.TimeoutExpired:
        raise subprocess.SubprocessError(f"{compiler} did not compile the CPU kernels in {COMPILER_S:.0f} s") from None
    if process.returncode:
        lines = output.strip().splitlines() or [f"exit status {process.returncode}"]
        # The first line may only say where the compiler was: "In file included from".
        cause = next((line for line in lines if "error: " in line.lower()), lines[0])
        raise subprocess.SubprocessError(f"{compiler} could not compile the CPU kernels: {cause}")


def build_all(folder: Path, targets: tuple[CpuTarget, ...] = TARGETS) -> list[Path]:
    """Build every dtype for every kind of CPU into a folder. Raises OSError and subprocess.SubprocessError."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler, built = library.find_compiler(), []
    for target in targets:
        for dtype in CPP_TYPES:
            path = library_path(folder, dtype, target)
            with tempfile.TemporaryDirectory() as scratch:
                made = compile_library(compiler, target_flags(dtype, target), Path(scratch))
                shutil.copyfile(made, path)
            path.chmod(0o755)
            library.digest_path(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
            built.append(path)
    return built


def main(folder: str, *names: str) -> None:
    """Build the libraries of the named kinds of CPUs, or of all, and print their paths."""
    for path in build_all(Path(folder), tuple(target for target in TARGETS if not names or target.name in names)):
        print(path)
