"""Signs of life: silence of a process, and the watch over ranks and their steps."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.engine.executors import rank_watch
from weft.engine.executors.node_messages import FromNode, ToNode
from weft.engine.executors.node_ranks import NodeRanks
from weft.engine.executors.rank_processes import RankProcesses
from weft.engine.executors.rank_watch import LONG_STEP, SHORTEST_WORK_S, RankWatch
from weft.engine.processes import beats as node_beats
from weft.engine.processes import liveness
from weft.engine.processes.framing import Channel, FrameDecoder
from weft.engine.processes.liveness import (
    BEAT_S,
    STEP,
    ProcessTimes,
    Silence,
    Work,
    catches_signal,
    read_other_work,
    read_times,
)
from weft.errors import CORE, Cause

LIMIT_S = 3.0


class Clock:
    """A process whose state and CPU seconds a test sets, and a time that goes on by heartbeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.cpu_s, self.read_bytes, self.now = "S", 1.0, 0, 100.0
        monkeypatch.setattr(liveness, "read_other_work", lambda pid: self.read_bytes)
        monkeypatch.setattr(liveness, "read_times", lambda pid: ProcessTimes(self.state, self.cpu_s))

    def beat(self, *silences: Silence, count: int = 1, cpu_s: float = 0.0) -> None:
        for _ in range(count):
            self.now += BEAT_S
            self.cpu_s += cpu_s
            for silence in silences:
                silence.tick(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_times_of_a_process() -> None:
    own = read_times(os.getpid())
    assert own is not None and own.cpu_s > 0 and own.state in "RSD" and not own.stopped
    assert read_times(2**31 - 1) is None


def test_silence(clock: Clock) -> None:
    silence = Silence(1)
    clock.beat(silence, count=3)
    assert silence.seconds == pytest.approx(2 * BEAT_S)
    silence.hear()
    clock.beat(silence)
    assert silence.seconds == 0
    clock.beat(silence, count=4, cpu_s=0.01)  # it computes, and cannot answer
    assert silence.seconds == 0 and silence.cpu_share == pytest.approx(0.01 / BEAT_S)
    for _ in range(4):  # it reads, and cannot answer
        clock.read_bytes += 1
        clock.beat(silence)
    assert silence.seconds == 0
    clock.now += 1000  # this process was stopped itself
    clock.beat(silence)
    assert silence.seconds == pytest.approx(2 * BEAT_S)
    clock.state = "T"
    clock.beat(silence)
    assert silence.reason.code == "process-stopped"
    clock.state = "S"
    clock.beat(silence)
    assert silence.reason.code == "process-silent"


class Ranks:
    """Two ranks, as far as the watch sees them."""

    def __init__(self) -> None:
        self.silences = {0: Silence(10), 1: Silence(11)}
        self.phases, self.steps = {0: "step", 1: "step"}, {0: 5, 1: 5}
        self.stacks = 0
        self.waits_for_compiler = False

    def print_stacks(self) -> None:
        self.stacks += 1


A_STEP = Work(STEP, "the first")


def watched(
    ranks: Ranks, clock: Clock, work: Work | None, beats: int, cpu_s: float = 0.0, deaf: tuple[int, ...] = ()
) -> Any:
    """The first cause that a watch finds, and the number of heartbeats until then."""
    watch = RankWatch(cast(RankProcesses, ranks), LIMIT_S, lambda: work, lambda cause: None)
    watch._stopped = cast(Any, SimpleNamespace(wait=lambda seconds: None))
    for beat in range(beats):
        for rank, silence in ranks.silences.items():
            if rank not in deaf:
                silence.hear(busy=ranks.waits_for_compiler)
        clock.beat(*ranks.silences.values(), cpu_s=cpu_s)
        cause = watch._silent_rank() or watch._stuck_work(clock.now)
        if cause is not None:
            return cause, beat
    return None, beats


def test_a_silent_rank_is_the_cause(clock: Clock) -> None:
    clock.state = "T"
    ranks = Ranks()
    cause, beats = watched(ranks, clock, A_STEP, 100, deaf=(1,))
    assert (cause.rank, cause.phase, cause.code) == (1, "step", "process-stopped")
    assert beats * BEAT_S == pytest.approx(LIMIT_S, abs=2 * BEAT_S)
    assert ranks.stacks == 1  # a step was in flight


def test_a_step_that_never_finishes(clock: Clock) -> None:
    ranks = Ranks()
    ranks.steps[1] = 4
    cause, beats = watched(ranks, clock, A_STEP, 100)
    assert isinstance(cause, Cause) and (cause.rank, cause.code) == (1, "step-stuck") and ranks.stacks == 1
    assert beats * BEAT_S == pytest.approx(LIMIT_S, abs=2 * BEAT_S)
    ranks.steps[1] = 5
    assert watched(ranks, clock, A_STEP, 100)[0].rank == CORE, "both have finished as many"


def test_a_step_that_computes_has_more_time(clock: Clock) -> None:
    cause, beats = watched(Ranks(), clock, A_STEP, 1000, cpu_s=0.1)
    assert cause.code == "step-stuck"
    assert beats * BEAT_S == pytest.approx(LONG_STEP * LIMIT_S, abs=2 * BEAT_S)
    assert watched(Ranks(), clock, None, 100)[0] is None, "nothing to do"


def test_time_in_which_the_watch_itself_was_stopped_does_not_count(clock: Clock) -> None:
    """A container that is paused, with the ranks in it, and goes on: the step needs a moment yet."""
    ranks, causes = Ranks(), []
    watch = RankWatch(cast(RankProcesses, ranks), LIMIT_S, lambda: A_STEP, lambda cause: None)
    watch._stopped = cast(Any, SimpleNamespace(wait=lambda seconds: None))
    for beat in range(100):
        clock.now += 1000 * (beat == 2)
        clock.beat()
        causes.append(watch._stuck_work(clock.now))
    assert not any(causes[:4]) and causes[10].code == "step-stuck", "but a step that never finishes is found"


@pytest.mark.parametrize("phase", ["load", "report"])
def test_a_start_and_a_command_that_never_finish(clock: Clock, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """No progress, no CPU time, no file read: but they have no limit while there is one of these."""
    other_work = [0, 0]
    monkeypatch.setattr(rank_watch, "read_other_work", lambda pid: other_work[pid - 10])
    work = Work(phase, "first sign", {1})
    ranks = Ranks()
    cause, beats = watched(ranks, clock, work, 100)
    assert (cause.rank, cause.phase, cause.code) == (1, phase, "rank-stuck") and ranks.stacks == 1
    assert beats * BEAT_S == pytest.approx(SHORTEST_WORK_S, abs=2 * BEAT_S)
    assert watched(ranks, clock, Work(phase, "first sign", {0, 1}), 100)[0].rank == CORE, "either may be the one"
    assert watched(ranks, clock, work, 1000, cpu_s=0.1)[0] is None
    ranks.waits_for_compiler = True
    assert watched(ranks, clock, work, 1000)[0] is None
    ranks.waits_for_compiler = False

    def read_on(pid: int) -> int:
        other_work[1] += 1
        return other_work[1]

    monkeypatch.setattr(rank_watch, "read_other_work", read_on)
    assert watched(ranks, clock, work, 1000)[0] is None


def test_other_work_of_a_process() -> None:
    """The CPU time of its children counts."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = read_other_work(os.getpid())
        while read_other_work(os.getpid()) == before:
            pass
    finally:
        child.kill()
        child.wait()
    assert read_other_work(2**31 - 1) == 0


@pytest.mark.parametrize(
    ("gaps", "beats_sent", "accused"), [([0.5] * 16, 16, 0), ([0.5] * 17, 16, 1), ([0.5, 60.0, 0.5], 3, 0)]
)
def test_a_node_that_was_stopped_itself_accuses_nobody(
    gaps: list[float], beats_sent: int, accused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times between two looks of a Watch that hears nothing."""
    clock, left = [0.0], list(gaps)
    sent: list[int] = []
    silent: list[int] = []

    class Passing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not left:
                return True
            clock[0] += left.pop(0)
            return False

    monkeypatch.setattr(node_beats, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(node_beats, "threading", SimpleNamespace(Event=Passing, Thread=threading.Thread))
    watch = node_beats.Watch(lambda: sent.append(1), lambda: silent.append(1), "node")
    watch._beat_until_closed()
    assert (len(sent), len(silent)) == (beats_sent, accused)


def test_a_beat_that_fails_does_not_end_the_beats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_beats, "BEAT_S", 0.001)
    enough, beats = threading.Event(), list[int]()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            enough.set()
        raise RuntimeError("dictionary changed size during iteration")

    watch = node_beats.Watch(beat, lambda: None, "test")
    watch.start()
    assert enough.wait(30)
    watch.stop()
    assert "dictionary changed size" in caplog.text


def test_a_node_reports_its_ranks_while_others_are_started() -> None:
    class Growing(dict[int, str]):
        """Phases to which another thread adds while they are read."""

        def items(self) -> Any:
            snapshot = super().items()
            self[len(self)] = "start"
            return snapshot

    ends = socket.socketpair()
    with ends[0], ends[1]:
        ranks = NodeRanks(Channel(ends[0], ToNode), 1, "127.0.0.1", "lo", "")
        ranks._processes.phases = Growing({0: "load"})
        ranks._beat()
        (beat,) = FrameDecoder[Any](FromNode).feed(ends[1].recv(1 << 16))
        assert {state.rank for state in beat.ranks} >= {0}


def test_a_signal_goes_to_a_process_that_handles_it() -> None:
    """One without a handler would end, and the number of one that has ended may be another's."""
    deaf = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    hears = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1); print(flush=True); input()"
    hearing = subprocess.Popen([sys.executable, "-c", hears], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert hearing.stdout and hearing.stdout.readline()
        assert not catches_signal(deaf.pid, signal.SIGUSR1) and catches_signal(hearing.pid, signal.SIGUSR1)
    finally:
        deaf.communicate(b"\n")
        hearing.communicate(b"\n")
    assert not catches_signal(deaf.pid, signal.SIGUSR1)
