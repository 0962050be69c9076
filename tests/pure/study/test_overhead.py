"""Cost of Python beside the model, in Python's own instructions, which no busy machine changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.refusals import refuses
from weft.errors import WeftError
from weft.study.bench import overhead
from weft.study.bench.overhead import BLOCK, CoreSteps, SchedulerSteps, count_instructions, loops_per_request
from weft.study.measure import memory

# Instructions for a request of a step, in iterations of the reference loop. When these were set the scheduler took 13,
# or 14 with a step ahead, and scheduled 430,000 to 510,000 requests a second on one core; 250,000 are what it must. The
# core's whole round took 17 and 18, and 0.06 ms for 32 requests; 0.5 ms are for that and for the ranks' own Python.
SCHEDULER, ROUND = 20.0, 26.0


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_scheduler_alone(lookahead: bool) -> None:
    assert loops_per_request(SchedulerSteps(256, lookahead=lookahead), 256) <= SCHEDULER


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_core_s_round(lookahead: bool) -> None:
    assert loops_per_request(CoreSteps(32, lookahead=lookahead), 32) <= ROUND


def test_twice_the_requests_are_twice_the_work() -> None:
    few, many = (
        sum(count_instructions(step) for _ in range(BLOCK)) for step in (SchedulerSteps(64), SchedulerSteps(256))
    )
    assert many <= 4 * few


def test_counting_is_exact_and_leaves_no_trace() -> None:
    def nothing() -> None:
        pass

    def loop(times: int) -> int:
        total = 0
        for _ in range(times):
            total += 1
        return total

    before = sys.gettrace()
    assert count_instructions(nothing) == count_instructions(nothing) > 0
    one, two, three = (count_instructions(lambda times=times: loop(times)) for times in (10, 20, 30))  # type: ignore[misc]
    assert two - one == three - two >= 10
    with pytest.raises(ZeroDivisionError):
        count_instructions(lambda: 1 / 0)
    assert sys.gettrace() is before
    assert overhead.reference_loop() == sum(range(overhead.ITERATIONS))


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "MEASURE_S", 0.001)
    found = overhead.overhead_report()
    assert all(value > 0 for value in found.values())


def test_memory_of_a_tree(tmp_path: Path) -> None:
    for pid, parent, pss in [(10, 1, 100), (11, 10, 20), (12, 11, 3), (13, 1, 4000), (14, 10, None)]:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) c) S {parent} 0 0")
        if pss is not None:
            (tmp_path / str(pid) / "smaps_rollup").write_text(f"x\nRss: 9 kB\nPss: {pss} kB\nPss_Anon: 1 kB\n")
    (tmp_path / "15").mkdir()  # it has ended
    (tmp_path / "sys").mkdir()
    assert sorted(memory.process_tree(10, tmp_path)) == [10, 11, 12, 14]
    assert memory.pss_bytes(10, tmp_path) == 123 * 1024
    with refuses(WeftError, "cannot-read-process-memory", "process 14"):
        memory.pss_bytes(14, tmp_path)
