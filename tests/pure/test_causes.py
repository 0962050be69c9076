"""Causes: one line for the user, from exceptions and from the ends of processes."""

from __future__ import annotations

import pytest

from weft.errors import Cause, EngineError, ModelError
from weft.executors.causes import cause_of, describe_exit, lost_peer


def test_advice_is_passed_on_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert cause_of(ModelError("no such model"), 2, "load") == Cause(2, "load", "no such model")
    assert capsys.readouterr().err == ""


def test_a_bug_is_one_line_and_its_trace_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cause_of(KeyError("a\nb"), 0, "step").cause == r"KeyError: 'a\nb'"
    assert cause_of(RuntimeError("one\n  two"), 0, "step").cause == "RuntimeError: one two"
    assert cause_of(NotImplementedError(), 0, "step").cause == "NotImplementedError"
    assert "RuntimeError: one" in capsys.readouterr().err


def test_a_cause_from_below_stays_as_it_is() -> None:
    below = Cause(3, "load", "cut off")
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
    assert "--" in cause_of(error, 0, phase).hint
    assert cause_of(error, 0, phase).cause


def test_a_lost_peer_is_told_from_a_fault_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConnectionAbortedError("lost another rank")
    assert lost_peer(error)
    assert not lost_peer(ValueError("no"))
    assert cause_of(error, 0, "step").cause == "ConnectionAbortedError: lost another rank"
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


@pytest.mark.parametrize(
    ("returncode", "words", "cause"),
    [
        (1, TRACE, "ended with status 1: ModuleNotFoundError: No module named 'torch'"),
        (0, "", "ended with status 0"),
        (-11, FATAL, "killed by SIGSEGV: Fatal Python error: Segmentation fault"),
        (-9, "some progress", "killed by SIGKILL"),
        (-200, "", "killed by signal 200"),
        (1, STUCK, "was stuck and ended itself"),
        (None, "", "closed its connection"),
    ],
)
def test_an_end_without_a_word(returncode: int | None, words: str, cause: str) -> None:
    text, hint = describe_exit(returncode, words)
    assert text == cause
    assert ("dmesg" in hint) == (returncode == -9)
