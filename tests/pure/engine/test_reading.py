"""Progress of reading weights: what a terminal and a log show."""

from __future__ import annotations

import logging
import sys

import pytest

from weft.engine.executors import reading
from weft.engine.executors.reading import CapturingProgress, ReadingProgress


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update is due."""
    for name in ("BAR_S", "LINE_S", "SHORTEST_S"):
        monkeypatch.setattr(reading, name, 0.0)


def test_a_terminal_has_a_bar_of_all_ranks_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ReadingProgress()
    progress.update(0, 1_000_000_000, 2_000_000_000)
    progress.update(1, 2_000_000_000, 2_000_000_000)
    last = terminal.text.rpartition("\r")[2]
    assert "3.0 GB of 4.0 GB" in last and "75 %" in last and "GB/s" in last
    assert last.count("#") * 4 == reading.WIDTH * 3
    progress.close()
    assert terminal.text.endswith("\r\x1b[K")
    progress.update(0, 2_000_000_000, 2_000_000_000)
    assert terminal.text.endswith("\r\x1b[K")


def test_a_log_has_lines_and_the_sum(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    with caplog.at_level(logging.INFO, "weft"):
        progress = ReadingProgress()
        progress.update(0, 1_000_000_000, 4_000_000_000)
        progress.update(0, 4_000_000_000, 4_000_000_000)
        progress.close()
        progress.close()
    assert [" 25 %" in line or "100 %" in line for line in caplog.messages] == [True, True, True]
    assert all("GB/s" in line for line in caplog.messages)


def test_graphs_that_every_rank_has(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    with caplog.at_level(logging.INFO, "weft"):
        progress = CapturingProgress()
        progress.update(0, 2, 5)
        progress.update(1, 1, 5)
        progress.close()
    assert ["2 of 5" in caplog.messages[0], *("1 of 5" in line for line in caplog.messages[1:])] == [True] * 3


def test_ranks_that_read_nothing_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft"):
        ReadingProgress().close()
    assert not caplog.messages
