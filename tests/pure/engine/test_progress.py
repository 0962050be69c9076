"""Bars of long tasks: on a terminal only."""

from __future__ import annotations

import io

import pytest

from weft.engine.client.progress import ProgressBar


class Terminal(io.StringIO):
    """A terminal that keeps what it is told."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("animated", [True, False])
def test_a_bar_on_a_terminal(animated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressBar(3, True, "Runs", animated=animated) as progress:
        progress.advance()
        progress.advance()
    assert "Runs:" in terminal.getvalue() and "2/3" in terminal.getvalue()


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr("sys.stderr", pipe)
    with ProgressBar(3, True, "Runs") as progress:
        progress.advance()
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressBar(3, False) as progress:
        progress.advance()
    assert pipe.getvalue() + terminal.getvalue() == ""
