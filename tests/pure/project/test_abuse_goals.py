"""Verdicts of scripts/abuse on a stall: met, missed, or undecided because the host was too busy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from scripts.programs.abuse.host import HostTimes, stolen_s
from scripts.programs.abuse.neighbour import _Gaps
from scripts.programs.abuse.runner import Goals, Result, Runner

GOALS = Goals(stall_s=0.25)
CALM = Result(
    "a case",
    "1",
    {"200": 1},
    [],
    worst_stall_s=0.4,
    undisturbed_stall_s=0.02,
    stall_stolen_s=0.01,
    steal_share=0.01,
    others_share=0.02,
)


@pytest.mark.parametrize(
    ("host", "decided"),
    [
        ({}, True),
        ({"stall_stolen_s": 0.16}, False),
        ({"undisturbed_stall_s": 0.13}, False),
        ({"others_share": 0.11}, False),
        ({"steal_share": 0.5}, True),  # at other times than during the gap
    ],
)
def test_a_busy_host_decides_nothing(host: dict[str, float], decided: bool) -> None:
    result = replace(CALM, **host)
    assert result.misses(GOALS) == (["stall"] if decided else [])
    assert (result.undecided(GOALS) is None) == decided


def test_a_goal_that_is_met_is_met_on_a_busy_host() -> None:
    result = replace(CALM, worst_stall_s=0.24, undisturbed_stall_s=0.2, others_share=0.9)
    assert result.misses(GOALS) == [] and result.undecided(GOALS) is None


def test_a_busy_host_excuses_nothing_else() -> None:
    result = replace(CALM, others_share=0.9, memory_before_bytes=100, memory_after_bytes=130, unexpected=["a 500"])
    assert result.misses(GOALS) == ["memory", "unexpected"]


@pytest.mark.parametrize(
    ("result", "missed", "undecided"),
    [
        (replace(CALM, worst_stall_s=0.1), [], []),
        (CALM, ["a case"], []),
        (replace(CALM, others_share=0.9), [], ["a case"]),
    ],
)
def test_the_report_tells_the_three_apart(result: Result, missed: list[str], undecided: list[str]) -> None:
    runner = Runner(("demo",), GOALS)
    runner._add(result)
    report = runner.report()
    assert (report["missed"], report["undecided"]) == (missed, undecided)
    assert report["ok"] == report["cases"][0]["ok"] == (not missed and not undecided)
    assert {"worst_stall_s", "undisturbed_stall_s", "steal_share", "others_share"} < report["cases"][0].keys()


def test_shares_of_the_cpu_time() -> None:
    before = HostTimes(all_s=100.0, stolen_s=1.0, busy_s=50.0, ours_s=10.0)
    after = HostTimes(all_s=120.0, stolen_s=3.0, busy_s=66.0, ours_s=20.0)
    assert after.shares_since(before) == pytest.approx((0.1, 0.3))
    now = HostTimes.now([psutil.Process()])
    assert 0 < now.ours_s <= now.busy_s <= now.all_s and now.stolen_s >= 0


def test_the_stolen_time_is_that_of_the_worst_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, stolen = iter([0.0, 1.0, 1.1, 1.6, 1.7]), iter([0.0, 5.0, 5.3, 5.4])
    monkeypatch.setattr("scripts.programs.abuse.neighbour.time.perf_counter", lambda: next(now_s))
    monkeypatch.setattr("scripts.programs.abuse.neighbour.stolen_s", lambda: next(stolen))
    gaps = _Gaps()
    for _ in range(3):
        gaps.event()
    lap = gaps.lap()
    assert (lap.worst_stall_s, lap.stolen_s, lap.events) == pytest.approx((0.5, 0.3, 3))


def test_a_system_that_does_not_count_stolen_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=1.0))
    assert stolen_s() == 0.0
