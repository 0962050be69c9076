"""Starts that somebody else has prepared: a socket's path for two, and libraries in the cache of kernels."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from scripts.programs.abuse.case import Life, Outcome
from scripts.programs.abuse.server import KEY, Server, StartError
from scripts.programs.abuse.target import Size, Target
from weft.cache import cache_dir

NOBODY = 65534
LOG_LINES = 20  # of a failed start; a traceback has more
PLANTED = '#include <fcntl.h>\n__attribute__((constructor)) static void planted() {{ creat("{mark}", 0600); }}\n'


def two_on_a_socket(words: tuple[str, ...]) -> Outcome:
    """Two servers that start at once on one path: one serves, and the other says why not."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/weft.sock"
        with Server(*words, "--uds", path, wait=False) as first, Server(*words, "--uds", path, wait=False) as second:
            for server in (first, second):
                with suppress(StartError):
                    server.wait_until_served()
            serving = [server for server in (first, second) if server.served]
            if len(serving) != 1:
                return Outcome({}, [f"{len(serving)} of two serve: {first.log()[-300:]} {second.log()[-300:]}"])
            target = Target(serving[0], KEY, Size())
            for server in (first, second):
                target.check(server.served or _is_brief(server), f"the other's words: {server.log()[-500:]}")
            target.record("the one", asyncio.run(target.get("/v1/models")), ("200",))
            took_s = round(serving[0].terminate(), 2)
            target.check(not os.path.exists(path), "the socket is still there after the end")
    return Outcome(dict(target.statuses), target.unexpected, took_s)


def damaged_library(damage: Callable[[Path, Path], None], words: tuple[str, ...]) -> Outcome:
    """A start after `damage` to the library in the cache, given that and the path of a mark: the library is built
    anew, or not used, or the start fails in few words. A library that is run would leave the mark."""
    with tempfile.TemporaryDirectory() as folder:
        cache, mark = Path(folder) / "weft", Path(folder) / "mark"
        cache.mkdir(mode=0o700)
        for file in cache_dir().glob("*.gguf"):  # of the model called demo
            shutil.copy(file, cache)
        environment = {"XDG_CACHE_HOME": folder}
        with Server(*words, environment=environment):
            libraries = list((cache / "kernels").glob("*.so"))
        if not libraries:
            return Outcome({}, ["there is no library in the cache: is there a C++ compiler?"])
        for library in libraries:
            damage(library, mark)
        return _start_again(words, environment, mark)


def _start_again(words: tuple[str, ...], environment: dict[str, str], mark: Path) -> Outcome:
    with Server(*words, environment=environment, wait=False) as server:
        unexpected, statuses = [], {}
        try:
            server.wait_until_served()
            target = Target(server, KEY, Size())
            body = {"prompt": "a", "max_tokens": 2}
            target.record("completion", asyncio.run(target.post("/v1/completions", body)), ("200",))
            statuses, unexpected = dict(target.statuses), target.unexpected
        except StartError:
            if not _is_brief(server):
                unexpected.append(f"the start fails with {server.process.poll()}: {server.log()[-500:]}")
        if "Traceback" in server.log():
            unexpected.append("a traceback in the log")
        if mark.exists():
            unexpected.append("what was planted has run")
    return Outcome(statuses, unexpected)


def _is_brief(server: Server) -> bool:
    """It has ended by itself, and said why in a few lines."""
    said = server.log()
    return server.process.poll() == 1 and 0 < said.count("\n") <= LOG_LINES and "Traceback" not in said


def truncate(library: Path, mark: Path) -> None:
    os.truncate(library, 100_000)


def empty(library: Path, mark: Path) -> None:
    os.truncate(library, 0)


def plant(library: Path, mark: Path) -> None:
    """Somebody else's library, with a digest that holds: by another owner if this is root, else writable by all."""
    source = library.with_suffix(".c")
    source.write_text(PLANTED.format(mark=mark))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    source.unlink()
    digest = library.with_suffix(".sha256")
    digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    for path in (library, digest):
        path.chmod(0o777)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)


LIVES = (
    Life("start-two-on-a-socket", "11", two_on_a_socket),
    Life("start-library-truncated", "8", partial(damaged_library, truncate)),
    Life("start-library-empty", "8", partial(damaged_library, empty)),
    Life("start-library-planted", "7", partial(damaged_library, plant)),
)
