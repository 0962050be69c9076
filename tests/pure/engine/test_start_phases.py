"""Words on a start of ranks: each phase when it begins, and its seconds when it ends."""

from __future__ import annotations

import logging
import sys

import pytest

from tests.log_events import logged
from weft.engine.executors.start_phases import ORDER, StartPhases


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    return caplog


def walk() -> None:
    phases = StartPhases(2)
    for name in ("start", "load", "load", "profile", "start", "sleep", "allocate", "step"):
        phases.enter(name)
    phases.close()
    phases.enter("load")  # as the ranks of an engine that has been asleep do


def test_each_phase_is_named_once_as_it_begins(heard: pytest.LogCaptureFixture) -> None:
    heard.set_level("INFO")
    walk()
    assert [line["phase"] for line in logged(heard, "start-phase")] == [*ORDER, ""]
    messages = [record.getMessage() for record in heard.records]
    assert "2 ranks" in messages[0] and all("0.0 s" in message for message in messages[1:])


def test_a_phase_that_nobody_enters_is_left_out(heard: pytest.LogCaptureFixture) -> None:
    heard.set_level("INFO")
    phases = StartPhases(1)
    for name in ("start", "load", "allocate"):
        phases.enter(name)
    assert [line["phase"] for line in logged(heard, "start-phase")] == ["start", "load", "allocate"]


@pytest.mark.parametrize(("terminal", "notebook"), [(True, False), (False, True), (False, False)])
def test_without_a_log_a_terminal_and_a_notebook_show_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, notebook: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "level", logging.WARNING)
    logging.getLogger("weft").manager._clear_cache()  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr("weft.engine.executors.start_phases.in_notebook", lambda: notebook)
    walk()
    shown = capsys.readouterr().err
    assert bool(shown) == (terminal or notebook) and shown.endswith("\x1b[K") == terminal
    assert shown.count("2 ranks") == 2 * (terminal or notebook)
