"""The library of the CPU kernels in C++: compiled once for this machine where there is a compiler, kept in the cache.

Nothing here needs torch: the compiler can begin while the ranks still import it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
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

from weft.cache import WAY_OUT, make_private
from weft.native import library
from weft.native.library import CPP_TYPES, SOURCES, Recipe

WIDEST_HEAD = 256  # as in paged.h: WIDEST
WIDEST_GROUP = 96  # as in tiles.h: QUERIES
TELL_AFTER_S = 10.0  # of waiting for another process's compiler
PATIENCE_S = 60.0  # with it: it may be stopped, and would never be done
COMPILER_S = 600.0  # what one of our own gets
POLL_S = 0.02

logger = logging.getLogger("weft")
_building = threading.Lock()  # one thread of this process


def native_obstacle(dtype: str, head_dim: int, group: int) -> str | None:
    """Why these kernels cannot serve a model of this dtype, head_dim and query heads per KV head."""
    if dtype not in CPP_TYPES:
        return f"they know bfloat16 and float32, not {dtype}"
    if head_dim > WIDEST_HEAD or group > WIDEST_GROUP:
        return f"head_dim {head_dim} with {group} query heads per KV head is beyond {WIDEST_HEAD} and {WIDEST_GROUP}"
    return None


@functools.cache
def build_library(dtype: str) -> Path:
    """The library for activations of a dtype of CPP_TYPES, from the cache or made now, which takes a compiler some seconds.

    One process builds and others wait, but not for ever for one that is stopped: the first to lose patience builds in
    its place. Whoever is through first or last, the file is always a whole one. One that is damaged is built anew.

    Raises FileNotFoundError without a compiler, OSError where the cache cannot be written or could have been written by
    other users, and subprocess.SubprocessError where the compiler fails.
    """
    recipe = library.recipe(dtype)
    path = recipe.path
    with _building:
        _make_folder(path.parent)
        if reason := library.objection(path):
            raise OSError(reason)
        for turn in itertools.count():
            if library.intact(path):
                return path
            lock = path.parent / f"{recipe.key}.{turn}.lock"
            with _alone(lock, path) as alone:
                if alone and not library.intact(path):
                    _build_alone(recipe, lock)
                    break
    if not library.intact(path):
        raise OSError(f"{path} was built, and does not hold what was written: check the disk, {WAY_OUT}")
    return path


@functools.cache
def load_library(dtype: str) -> ctypes.CDLL:
    """The library for a dtype of CPP_TYPES in this process. Raises what `build_library` does, and OSError if it does not load."""
    return library.load(build_library(dtype))


def _build_alone(recipe: Recipe, lock: Path) -> None:
    """Build the library in the place of a damaged one, while nobody else does: this process has the `lock`."""
    folder = recipe.path.parent
    if recipe.path.exists():
        logger.warning("The CPU kernels in %s are damaged, and are built anew.", recipe.path)
    for left in folder.glob(f"{lock.stem}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{lock.stem}-", dir=folder) as scratch:
        library.keep(_compile(recipe.compiler, recipe.flags, Path(scratch)), recipe.path)


def _make_folder(folder: Path) -> None:
    try:
        make_private(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> OSError:
    return OSError(f"{folder} cannot be written ({error.strerror}); let XDG_CACHE_HOME be one that can")


@contextlib.contextmanager
def _alone(path: Path, awaited: Path) -> Iterator[bool]:
    """Holding the lock, which the death of its holder frees; False where `awaited` has come meanwhile, or whoever holds
    the lock has had it for longer than PATIENCE_S."""
    try:
        lock = path.open("a+")
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with lock:
        began, told = time.monotonic(), False
        while not _locked(lock.fileno()):
            waited = time.monotonic() - began
            if waited > PATIENCE_S:
                logger.warning("The CPU kernels are compiled again: %s did not in %.0f s.", _holder(path), waited)
            if waited > PATIENCE_S or library.intact(awaited):
                yield False
                return
            if waited > TELL_AFTER_S and not told:
                told = True
                logger.warning(
                    "Waiting for the CPU kernels, which %s compiles (it holds %s); end it if it hangs, or wait %.0f s "
                    "more, and they are compiled here.",
                    *(_holder(path), path, PATIENCE_S - waited),
                )
            time.sleep(POLL_S)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        yield True


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: Path) -> str:
    return lock.read_text() or "another process"  # that has not signed yet


def build_ahead(dtype: str) -> threading.Thread:
    """Begin to build, in a thread of its own. Whoever calls `build_library` waits for it, and hears why it could not."""

    def run() -> None:
        with contextlib.suppress(Exception):
            build_library(dtype)

    thread = threading.Thread(target=run, name="weft-compile", daemon=True)
    thread.start()
    return thread


def _compile(compiler: str, flags: Iterable[str], scratch: Path) -> Path:
    """The library, in `scratch`: its parts by as many compilers at once."""
    parts = {part: scratch / f"{part.stem}.o" for part in sorted(SOURCES.glob("*.cpp"))}
    _run([[compiler, *flags, "-c", str(part), "-o", str(made)] for part, made in parts.items()])
    whole = scratch / "library.so"
    _run([[compiler, "-shared", "-pthread", *map(str, parts.values()), "-o", str(whole)]])
    return whole


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
            try:
                words = process.communicate(timeout=COMPILER_S)[0]
            except subprocess.TimeoutExpired:
                raise subprocess.SubprocessError(f"{command[0]} did not build them in {COMPILER_S:.0f} s") from None
            if process.returncode:
                lines = words.strip().splitlines() or [f"exit status {process.returncode}"]
                # What comes first may say no more than where it was: "In file included from".
                cause = next((line for line in lines if "error: " in line.lower()), lines[0])
                raise subprocess.SubprocessError(f"{command[0]} could not build them: {cause}")
