"""Whatever dies, and whenever: all of it goes, nothing is left, and who asked for something is told why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import psutil
import pytest
from fake_worker import HERE

from tests.cpu.families import SERVER

ROOT = Path(__file__).parents[2]
DEATH_S = 5  # the promise: so long may the last process live once one has died
WAIT_S = 60


class Program:
    """A running mortal.py and its family; what it prints comes line by line."""

    def __init__(self, kind: str, model: str, *, worker: str = HERE, tensor: int = 2, stages: int = 1) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/cpu")])
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/cpu/mortal.py"), kind, worker, model, str(tensor), str(stages)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.members: list[psutil.Process] = []
        self.lines: SimpleQueue[str] = SimpleQueue()
        assert self.process.stdout
        assert self.process.stderr
        self.readers = [
            threading.Thread(target=self._read, args=(pipe,)) for pipe in (self.process.stdout, self.process.stderr)
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self.lines.put(line.strip())

    def until(self, words: str) -> str:
        """Wait for a line with these words."""
        while words not in (line := self.lines.get(timeout=WAIT_S)):
            pass
        return line

    def family(self) -> list[psutil.Process]:
        """This process and all below it: the core, if there is one, the fork server, the ranks."""
        me = psutil.Process(self.process.pid)
        self.members = [me, *me.children(recursive=True)]
        return self.members

    def end(self) -> None:
        """End processes that a failed test has left."""
        for member in filter(lives, self.members):
            member.kill()
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.end()


def left(family: list[psutil.Process]) -> list[psutil.Process]:
    """Processes that still run after the promised time."""
    deadline, alive = time.monotonic() + DEATH_S, family
    while (alive := [member for member in alive if lives(member)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def lives(member: psutil.Process) -> bool:
    """An orphan that nobody reaps is dead as well."""
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("tensor", "stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)], ids=["shared memory", "gloo"]
)
@pytest.mark.parametrize(
    ("victim", "failed"),
    # test_a_killed_fork_server_ends_nobody kills rank 1 too.
    [(0, None), (1, "core"), (3, "rank 0"), pytest.param(4, "rank 1", marks=pytest.mark.long)],
    ids=["parent", "core", "rank 0", "rank 1"],
)
def test_sigkill(programs: list[Program], victim: int, failed: str | None, tensor: int, stages: int) -> None:
    """While one rank hangs and the other waits for it."""
    programs.append(Program("engine", "hang 0 step", tensor=tensor, stages=stages))
    programs[0].until("rank 0 hangs in step")
    family = programs[0].family()
    assert len(family) == 5
    by_age = [*family[:2], *sorted(family[2:], key=lambda member: member.pid)]
    by_age[victim].kill()
    if failed:
        assert re.search(rf"^failed: process-killed: .*\b{failed} .*\bstep\b.*\bSIGKILL", programs[0].until("failed:"))
    assert left(family) == []


def test_a_killed_fork_server_ends_nobody(programs: list[Program]) -> None:
    """The ranks go on without it. Whatever dies afterwards, all of it goes."""
    programs.append(Program("engine", "hang 0 step"))
    programs[0].until("rank 0 hangs in step")
    family = programs[0].family()
    server = next(member for member in family if SERVER in member.cmdline())
    server.kill()
    assert left([server]) == []
    others = [member for member in family if member != server]
    assert all(map(lives, others))
    max(others, key=lambda member: member.pid).kill()
    assert re.search(r"^failed: .*\brank 1 .*\bstep\b", programs[0].until("failed:"))
    assert left(others) == []


def seldom(*values: object) -> Any:
    """A case of a test that is run with the long ones only."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "members", "phase", "blow"),
    [
        ("executor", 4, "import", signal.SIGKILL),
        ("engine", 5, "step", signal.SIGINT),
        ("engine", 5, "start", signal.SIGKILL),
        # test_a_stopped_rank_dies_too interrupts an executor's program.
        *(seldom("executor", 4, phase, signal.SIGINT) for phase in ("import", "start", "load", "allocate", "step")),
        seldom("executor", 4, "load", signal.SIGKILL),
        *(seldom("engine", 5, phase, signal.SIGINT) for phase in ("import", "allocate")),
        seldom("engine", 5, "load", signal.SIGKILL),
    ],
)
def test_the_parent_is_ended(
    programs: list[Program], kind: str, members: int, phase: str, blow: signal.Signals
) -> None:
    worker = "hang_on_import:FakeWorker" if phase == "import" else HERE
    programs.append(Program(kind, "fine" if phase == "import" else f"hang 1 {phase}", worker=worker))
    programs[0].until(f"hangs in {phase}")
    family = programs[0].family()
    assert len(family) == members
    programs[0].process.send_signal(blow)
    assert left(family) == []
    if blow is signal.SIGINT:
        assert programs[0].until("KeyboardInterrupt")


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=lambda blow: blow.name)
def test_a_stopped_rank_dies_too(programs: list[Program], blow: signal.Signals) -> None:
    """It cannot end itself: its parent ends it, or the system where the parent is dead."""
    programs.append(Program("executor", "hang 0 step"))
    programs[0].until("rank 0 hangs in step")
    family = programs[0].family()
    family[-1].suspend()
    programs[0].process.send_signal(blow)
    assert left(family) == []


def test_a_stopped_core_dies_with_its_parent(programs: list[Program]) -> None:
    """Nobody is left who would end it, or its ranks."""
    programs.append(Program("engine", "hang 0 step"))
    programs[0].until("rank 0 hangs in step")
    family = programs[0].family()
    family[1].suspend()
    assert "weft.engine.replicas.process" in family[1].cmdline()
    programs[0].process.kill()
    assert left(family) == []


def test_a_fork_of_the_parent_keeps_nobody_alive(programs: list[Program]) -> None:
    """It inherits the sockets, as a data loader's would."""
    programs.append(Program("forker", "fine"))
    fork = psutil.Process(int(programs[0].until("fork").split()[1]))
    family = [member for member in programs[0].family() if member != fork]
    assert len(family) == 4
    try:
        programs[0].process.kill()
        assert left(family) == []
        assert lives(fork)
    finally:
        fork.kill()


def test_sigterm_to_everybody_is_the_parents_to_answer(programs: list[Program]) -> None:
    """A service manager signals the whole group: only the parent acts on it, and it may drain first."""
    programs.append(Program("engine", "fine"))
    programs[0].until("started")
    for member in programs[0].family()[1:]:
        member.send_signal(signal.SIGTERM)
        member.send_signal(signal.SIGINT)
    assert programs[0].process.wait(WAIT_S) == 0, "the request was answered all the same"


def test_an_ordinary_end_leaves_nothing(programs: list[Program]) -> None:
    """Without `close`: the interpreter's end is enough."""
    programs.append(Program("executor", "fine"))
    programs[0].until("started")
    family = programs[0].family() if programs[0].process.poll() is None else []
    assert programs[0].process.wait(WAIT_S) == 0
    assert left(family) == []
