"""The library of the CPU kernels: built once, ahead of time where that helps, and what a compiler may do to it."""

from __future__ import annotations

import subprocess
import sys
import threading
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
    left = cache / f"{library.stem.removeprefix('bfloat16-')}-left"
    left.mkdir()
    (left / "native.o").touch()
    library.unlink()
    compiled.build.cache_clear()
    assert compiled.build("bfloat16") == library
    assert not left.exists()


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
