"""Causes: one line for the user, from exceptions and from the ends of processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.engine.executors.ranks import CLOSED
from weft.engine.processes.causes import cause_of, describe_exit, lost_peer
from weft.errors import Cause, EngineError, ModelError


def test_advice_is_passed_on_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    error = ModelError("no such model", code="no-such-model")
    cause = Cause(rank=2, phase="load", code="no-such-model", cause="no such model")
    assert cause_of(error, 2, "load") == cause and EngineError(cause).code == "no-such-model"
    assert capsys.readouterr().err == ""


def test_a_bug_is_one_line_and_its_trace_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cause_of(KeyError("a\nb"), 0, "step").cause == r"KeyError: 'a\nb'"
    assert cause_of(RuntimeError("one\n  two"), 0, "step").cause == "RuntimeError: one two"
    cause = cause_of(NotImplementedError(), 0, "step")
    assert (cause.code, cause.cause) == ("internal-error", "NotImplementedError")
    assert "RuntimeError: one" in capsys.readouterr().err


def test_a_cause_from_below_stays_as_it_is() -> None:
    below = Cause(rank=3, phase="load", code="short-tensor", cause="cut off")
    assert cause_of(EngineError(below), -1, "start") is below


@pytest.mark.parametrize("phase", ["load", "allocate", "step"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_has_a_way_out_in_each_phase(error: Exception, phase: str) -> None:
    cause = cause_of(error, 0, phase)
    assert cause.code == "out-of-memory" and "--" in cause.hint and cause.cause


def test_a_lost_peer_is_told_from_a_fault_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConnectionAbortedError("lost another rank")
    assert lost_peer(error)
    assert not lost_peer(ValueError("no"))
    cause = cause_of(error, 0, "step")
    assert (cause.code, cause.cause) == ("peer-lost", "ConnectionAbortedError: lost another rank")
    assert capsys.readouterr().err == ""


TRACE = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
ModuleNotFoundError: No module named 'torch'

"""
FATAL = """Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "x.py", line 1
Extension modules: numpy (total: 1)
"""


STUCK = """
Timeout (0:02:00)!
Thread 0x00007fd6729d0b80 (most recent call first):
  File "_symmetric_memory/__init__.py", line 2003 in rendezvous
"""


EXITS: list[tuple[int | None, str, str]] = [
    (1, TRACE, "process-ended"),
    (0, "", "connection-closed"),
    (-11, FATAL, "process-killed"),
    (-9, "some progress", "process-killed"),
    (-200, "", "process-killed"),
    (1, STUCK, "process-stuck"),
    (None, "", "connection-closed"),
]


@pytest.mark.parametrize(("returncode", "words", "code"), EXITS)
def test_an_end_without_a_word(returncode: int | None, words: str, code: str) -> None:
    reason = describe_exit(returncode, words)
    assert reason.code == code
    assert ("dmesg" in reason.hint) == (returncode == -9)
    assert ("ModuleNotFoundError" in reason.cause) == (words == TRACE)
    assert ("SIGSEGV" in reason.cause and "Segmentation fault" in reason.cause) == (words == FATAL)
    assert reason.of(3, "load") == Cause(rank=3, phase="load", code=code, cause=reason.cause, hint=reason.hint)


def test_the_words_of_causes(golden: Callable[[str, str], None]) -> None:
    exits = [describe_exit(returncode, words).of(0, "step") for returncode, words, _ in EXITS]
    memory = [cause_of(MemoryError(), 0, phase) for phase in ("load", "allocate", "step")]
    golden("errors/causes.txt", "".join(f"{cause.code}: {cause}\n" for cause in [*exits, *memory, CLOSED]))


def test_a_process_whose_exit_status_nobody_knows() -> None:
    """One that still runs has closed its connection; one that has ended was forked by a server that is gone."""
    assert describe_exit(None, "").code == "connection-closed"
    assert describe_exit(None, FATAL, ended=True).code == "process-ended"
