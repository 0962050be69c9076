"""OpenTraces: a profile whose steps do not all come before the engine closes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.log_events import logged
from weft.engine.client import traces
from weft.engine.client.traces import OpenTraces
from weft.engine.core.commands import TraceFile


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    caplog.set_level("INFO")


def test_the_files_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, waited = tmp_path / "rank0.json.gz", list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            file.touch()

    monkeypatch.setattr("weft.engine.client.traces.time.sleep", sleep)
    kept = OpenTraces(elsewhere=False)
    assert not kept and kept.begin(20, [TraceFile(str(file)), TraceFile("")]) == [str(file)]
    assert kept
    kept.end([TraceFile(str(file), 17), TraceFile("", 17)])
    assert len(waited) == 3 and not kept
    (line,) = logged(caplog, "trace-ended")
    assert (line["steps"], line["wanted"]) == (17, 20) and caplog.records[-1].levelname == "WARNING"


def test_a_trace_that_has_ended_by_itself_has_all_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = OpenTraces(elsewhere=True)  # its file is on another machine
    kept.begin(20, [TraceFile(str(tmp_path / "absent"))])
    kept.end([TraceFile("")])
    (line,) = logged(caplog, "trace-ended")
    assert line["steps"] == 20 and caplog.records[-1].levelname == "INFO"


def test_a_file_that_never_comes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "WRITE_S", -1)
    kept = OpenTraces(elsewhere=False)
    kept.begin(1, [TraceFile(str(tmp_path / "absent"))])
    kept.end([])
    assert not kept
