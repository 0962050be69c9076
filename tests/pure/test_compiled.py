"""The library of the CPU kernels: built once, ahead of time where that helps, and what a compiler may do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.pure.machines import plan
from weft import compiled
from weft.executors.ranks import compile_ahead

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
    compiled.build.cache_clear()
    yield tmp_path / "weft/kernels"
    compiled.build.cache_clear()


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


PARTS = len(list(compiled.SOURCES.glob("*.cpp")))


def test_processes_and_threads_build_it_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install(FAKE, tmp_path, monkeypatch, seconds=0.2)
    ahead = compiled.build_ahead("bfloat16")
    command = [sys.executable, "-c", "from weft import compiled; print(compiled.build('bfloat16'))"]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {Path(process.communicate(timeout=60)[0].strip()) for process in others}
    assert found | {compiled.build("bfloat16")} == set(cache.glob("*.so"))
    wait_for(ahead)
    # Each part, and the link.
    assert calls(log) == PARTS + 1
    # Another dtype is another library.
    assert compiled.build("float32") != compiled.build("bfloat16")


def test_a_compiler_that_fails_is_heard_by_whoever_needs_the_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(BROKEN, tmp_path, monkeypatch)
    wait_for(compiled.build_ahead("bfloat16"))
    assert log.exists()
    with pytest.raises(Exception, match=r"compiler could not build them: no such instruction"):
        compiled.build("bfloat16")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_the_cause_is_told_and_not_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "echo '/tmp/x.s: Assembler messages:'; echo '/tmp/x.s: Fatal error: write: No space left on device'"
    install(BROKEN.replace('echo "no such instruction"', f"({said})"), tmp_path, monkeypatch)
    with pytest.raises(subprocess.SubprocessError, match=r"could not build them: .*No space left on device$"):
        compiled.build("bfloat16")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    wait_for(compiled.build_ahead("bfloat16"))
    with pytest.raises(FileNotFoundError, match="install g"):
        compiled.build("bfloat16")


def test_what_a_killed_process_left_is_cleared_away(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FAKE, tmp_path, monkeypatch)
    library = compiled.build("bfloat16")
    left = cache / f"{library.stem.removeprefix('bfloat16-')}.0-left"
    left.mkdir()
    (left / "native.o").touch()
    library.unlink()
    compiled.build.cache_clear()
    assert compiled.build("bfloat16") == library
    assert not left.exists()


# --- others who build it ---

# A compiler that is at work for as long as there is a file called slow beside it.
SLOW = FAKE.replace("sleep {seconds}", 'while [ -e "$(dirname $0)/slow" ]; do sleep 0.05; done')
BUILD = """
import logging, sys
from weft import compiled
logging.basicConfig(format="%(message)s")
compiled.TELL_AFTER_S, compiled.PATIENCE_S = map(float, sys.argv[1:])
print(compiled.build("bfloat16"))
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


def test_who_is_stopped_is_not_waited_for(cache: Path, tmp_path: Path, stopped: subprocess.Popen[str]) -> None:
    """The others build it once more, for all of them, and say why; who goes on afterwards harms nothing."""
    others = [builder(tell_after=0.1, patience=2) for _ in range(2)]
    ends = [end(process) for process in others]
    library, holder = ends[0][0], f"process {stopped.pid} on {os.uname().nodename}"
    assert ends[1][0] == library and library.read_text() == "made\n"
    for _, told in ends:
        assert f"Waiting for the CPU kernels, which {holder} compiles (it holds {cache}/" in told
        assert f"compiled again: {holder} did not in " in told
    assert calls(tmp_path / "calls") == 2 * PARTS + 1
    stopped.send_signal(signal.SIGCONT)
    assert end(stopped) == (library, "") and library.read_text() == "made\n"
    assert {path.suffix for path in cache.iterdir()} == {".so", ".lock"}


def test_who_has_died_is_not_waited_for(cache: Path, stopped: subprocess.Popen[str]) -> None:
    stopped.kill()
    stopped.wait(30)
    library, told = end(builder(tell_after=0))
    assert library.exists() and not told
    assert len(list(cache.glob("*.lock"))) == 1


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FAKE, tmp_path, monkeypatch, seconds=600)
    monkeypatch.setattr(compiled, "COMPILER_S", 0.1)
    with pytest.raises(subprocess.SubprocessError, match="did not build them in 0 s"):
        compiled.build("bfloat16")


# --- who begins ---


@pytest.mark.parametrize(
    ("change", "ahead"),
    [
        ({"dtype": "bfloat16"}, ["bfloat16"]),
        ({"dtype": "float32", "attention_backend": "cpu"}, ["float32"]),
        ({"dtype": "float16"}, []),
        ({"attention_backend": "torch"}, []),
        ({"devices": ("cuda:0",)}, []),
    ],
)
def test_the_compiler_begins_where_a_rank_will_want_it(
    change: dict[str, object], ahead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(compiled, "build_ahead", begun.append)
    compile_ahead(msgspec.structs.replace(plan(), **change))
    assert begun == ahead
