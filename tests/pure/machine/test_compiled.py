"""The library of the CPU kernels: built once, ahead of time where that helps, and what a compiler may do to it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.log_events import logged
from tests.pure.machines import plan
from tests.refusals import has_values
from weft.cache import distrust_reason
from weft.engine.executors.ranks import compile_ahead
from weft.machine.native import build, library, prebuilt
from weft.plan.plan import named_devices

# Notes each call, and writes what it was asked for where that is wanted.
FAKE = """#!/bin/sh
echo "$@" >> {log}
sleep {seconds}
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
"""
BROKEN = """#!/bin/sh
echo "$@" >> {log}
echo "no such instruction" >&2
exit 1
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for known in (build.build_library, build.load_library, library.warn_once):
        known.cache_clear()
    yield tmp_path / "weft/kernels"
    build.build_library.cache_clear()
    build.load_library.cache_clear()


def install(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0) -> Path:
    """A compiler of our own; the file in which it notes its calls."""
    program, log = tmp_path / "compiler", tmp_path / "calls"
    program.write_text(script.format(log=log, seconds=seconds))
    program.chmod(0o700)
    monkeypatch.setenv("CXX", str(program))
    return log


def calls(log: Path) -> int:
    return len(log.read_text().splitlines())


def wait_for(ahead: threading.Thread) -> None:
    ahead.join(30)
    assert not ahead.is_alive()


PARTS = len(list(build.SOURCES.glob("*.cpp")))


def test_processes_and_threads_build_it_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(FAKE, tmp_path, monkeypatch, seconds=0.2)
    ahead = build.build_ahead("bfloat16")
    command = [sys.executable, "-c", "from weft.machine.native import build; print(build.build_library('bfloat16'))"]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {Path(process.communicate(timeout=60)[0].strip()) for process in others}
    assert found | {build.build_library("bfloat16")} == set(cache.glob("*.so"))
    wait_for(ahead)
    # Each part, and the link.
    assert calls(log) == PARTS + 1
    # Another dtype is another library.
    assert build.build_library("float32") != build.build_library("bfloat16")


def test_a_compiler_that_fails_is_heard_by_whoever_needs_the_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(BROKEN, tmp_path, monkeypatch)
    wait_for(build.build_ahead("bfloat16"))
    assert log.exists()
    with pytest.raises(subprocess.SubprocessError, match="no such instruction"):
        build.build_library("bfloat16")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_the_cause_is_told_and_not_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "echo '/tmp/x.s: Assembler messages:'; echo '/tmp/x.s: Fatal error: write: No space left on device'"
    install(BROKEN.replace('echo "no such instruction"', f"({said})"), tmp_path, monkeypatch)
    with pytest.raises(subprocess.SubprocessError, match=r"No space left on device$"):
        build.build_library("bfloat16")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    wait_for(build.build_ahead("bfloat16"))
    with pytest.raises(FileNotFoundError, match=r"g\+\+"):
        build.build_library("bfloat16")


def test_files_of_a_killed_process_are_cleared_away(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FAKE, tmp_path, monkeypatch)
    path = build.build_library("bfloat16")
    left = cache / f"{path.stem.removeprefix('bfloat16-')}.0-left"
    left.mkdir()
    (left / "native.o").touch()
    path.unlink()
    build.build_library.cache_clear()
    assert build.build_library("bfloat16") == path
    assert not left.exists()


# --- others who build it ---

# A compiler that is at work for as long as there is a file called slow beside it.
SLOW = FAKE.replace("sleep {seconds}", 'while [ -e "$(dirname $0)/slow" ]; do sleep 0.05; done')
BUILD = """
import logging, sys
from weft.machine.native import build
logging.basicConfig(format="%(message)s")
build.REPORT_AFTER_S, build.PATIENCE_S = map(float, sys.argv[1:])
print(build.build_library("bfloat16"))
"""


def builder(*, tell_after: float = 60, patience: float = 60) -> subprocess.Popen[str]:
    """A process that prints the library's path, and on standard error what it says while it waits."""
    command = [sys.executable, "-c", BUILD, str(tell_after), str(patience)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[Path, str]:
    said, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    return Path(said.strip()), told


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that was stopped while its compilers were at work."""
    log, slow = install(SLOW, tmp_path, monkeypatch), tmp_path / "slow"
    slow.touch()
    process = builder()
    while not log.exists() or calls(log) < PARTS:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    slow.unlink()
    yield process
    process.kill()
    process.communicate()


def test_a_stopped_process_is_not_waited_for(cache: Path, tmp_path: Path, stopped: subprocess.Popen[str]) -> None:
    """The others build it once more, for all of them, and say why; who goes on afterwards harms nothing."""
    others = [builder(tell_after=0.1, patience=2) for _ in range(2)]
    ends = [end(process) for process in others]
    path, holder = ends[0][0], f"process {stopped.pid} on {os.uname().nodename}"
    assert ends[1][0] == path and path.read_text() == "made\n"
    for _, told in ends:
        has_values(told, holder, f"{cache}/")
    # One of them at least: the other may have begun to wait later, and found what that one built.
    assert any(told.count(holder) == 2 for _, told in ends)
    assert calls(tmp_path / "calls") == 2 * PARTS + 1
    stopped.send_signal(signal.SIGCONT)
    assert end(stopped) == (path, "") and path.read_text() == "made\n"
    assert {place.suffix for place in cache.iterdir()} == {".so", ".sha256", ".lock"}


def test_a_dead_process_is_not_waited_for(cache: Path, stopped: subprocess.Popen[str]) -> None:
    stopped.kill()
    stopped.wait(30)
    path, told = end(builder(tell_after=0))
    assert path.exists() and not told
    assert len(list(cache.glob("*.lock"))) == 1


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FAKE, tmp_path, monkeypatch, seconds=600)
    monkeypatch.setattr(build, "COMPILER_S", 0.1)
    with pytest.raises(subprocess.SubprocessError, match=r"compile .* in 0 s"):
        build.build_library("bfloat16")


# --- who begins ---


@pytest.mark.parametrize(
    ("change", "ahead"),
    [
        ({"dtype": "bfloat16"}, ["bfloat16"]),
        ({"dtype": "float32", "attention_backend": "cpu"}, ["float32"]),
        ({"dtype": "float16"}, []),
        ({"attention_backend": "torch"}, []),
        ({"devices": named_devices("cuda:0")}, []),
    ],
)
def test_the_compiler_begins_where_a_rank_will_want_it(
    change: dict[str, object], ahead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(build, "build_ahead", begun.append)
    compile_ahead(msgspec.structs.replace(plan(), **change))
    assert begun == ahead


# --- whose code it is ---

NOBODY = 65_534


def built(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A library in the cache, and the log of the compiler that made it; this process has forgotten of it."""
    log = install(FAKE, tmp_path, monkeypatch)
    path = build.build_library("bfloat16")
    build.build_library.cache_clear()
    return path, log


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it belong to somebody else: by its owner, or for those who may not change that, by who we are."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


@pytest.mark.parametrize("what", ["library", "digest", "kernels", "weft"])
@pytest.mark.parametrize("how", ["theirs", "open"])
def test_files_that_others_can_write_are_not_loaded(
    what: str, how: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, log = built(cache, tmp_path, monkeypatch)
    before = calls(log)
    place = {"library": path, "digest": path.with_suffix(".sha256"), "kernels": cache, "weft": cache.parent}[what]
    if how == "theirs":
        give_away(place, monkeypatch)
        said = r" user \d+, .* XDG_CACHE_HOME"
    else:
        place.chmod(0o777)
        said = r"\b777\b.* `chmod go-w` .* XDG_CACHE_HOME"
    with pytest.raises(OSError, match=said) as error:
        library.open_library(path)
    assert "\n" not in str(error.value)
    with pytest.raises(OSError, match=said):
        build.load_library("bfloat16")
    assert calls(log) == before
    # Nor by whoever measures for a plan, which says so and goes on.
    assert prebuilt.built_library() == "" and len(logged(caplog, "cpu-kernels-not-loaded")) == 1


def test_a_folder_of_everybody_above_the_cache_is_refused_unless_it_is_sticky(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = built(cache, tmp_path, monkeypatch)
    tmp_path.chmod(0o1777)
    assert distrust_reason(path) is None
    tmp_path.chmod(0o770)  # of a home with a group of its own
    assert distrust_reason(path) is None
    tmp_path.chmod(0o777)
    assert "777" in str(distrust_reason(path))


def test_files_are_ours_alone_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new/cache"))
    install(FAKE, tmp_path, monkeypatch)
    before = os.umask(0)
    try:
        path = build.build_library("bfloat16")
    finally:
        os.umask(before)
    folders = (tmp_path / "new", tmp_path / "new/cache", path.parent.parent, path.parent)
    assert [stat.S_IMODE(place.stat().st_mode) for place in folders] == [0o700] * 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.with_suffix(".sha256").stat().st_mode) == 0o600
    assert distrust_reason(path) is None


@pytest.mark.parametrize("damage", ["cut short", "emptied", "changed", "no digest", "another's digest"])
def test_a_damaged_library_is_built_anew(
    damage: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, log = built(cache, tmp_path, monkeypatch)
    before = calls(log)
    match damage:
        case "cut short":
            path.write_bytes(path.read_bytes()[:3])
        case "emptied":
            path.write_bytes(b"")
        case "changed":
            path.write_bytes(b"MADE\n")
        case "no digest":
            path.with_suffix(".sha256").unlink()
        case "another's digest":
            path.with_suffix(".sha256").write_text("0" * 64)
    assert prebuilt.built_library() == ""
    with pytest.raises(OSError, match="damaged: its digest"):
        library.open_library(path)
    assert build.build_library("bfloat16") == path and path.read_text() == "made\n"
    assert calls(log) == before + PARTS + 1 and logged(caplog, "cpu-kernels-damaged") == [{"path": str(path)}]
    assert prebuilt.built_library() == str(path)


def test_a_disk_that_does_not_keep_it_is_told_after_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(FAKE, tmp_path, monkeypatch)
    monkeypatch.setattr(library, "is_intact", lambda _: False)
    with pytest.raises(OSError, match="check the disk"):
        build.build_library("bfloat16")
    assert calls(log) == PARTS + 1


def test_a_library_reaches_the_disk_before_it_gets_its_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then the name does."""
    install(FAKE, tmp_path, monkeypatch)
    order: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        order.append(("flush", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(old: Path, new: Path) -> None:
        order.append(("rename", str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    path = build.build_library("bfloat16")
    assert [what for what, _ in order] == ["flush", "rename", "flush"] * 2
    assert [where for _, where in order[1:3]] == [str(path.with_suffix(".sha256")), str(cache)]
    assert [where for _, where in order[4:]] == [str(path), str(cache)]
