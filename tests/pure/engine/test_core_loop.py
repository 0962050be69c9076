"""The loop that steps a core."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.pure.scheduling import request
from tests.refusals import refuses
from weft.engine.core.commands import ResetPrefixCache
from weft.engine.core.request import Output, Stats
from weft.engine.core.step import TokenLogprobs
from weft.engine.frontend import checks
from weft.engine.processes import framing
from weft.engine.processes.framing import FrameDecoder, encode_frame
from weft.engine.replicas.local import CoreThread, Query
from weft.engine.replicas.messages import CallDone, CallRanks, FromCore
from weft.engine.replicas.process import CoreProcess
from weft.errors import CORE, Cause, EngineError, RequestError

CAUSE = Cause(rank=CORE, phase="step", code="test-over", cause="the test is over")


class FakeCore:
    """A core without requests, which counts how often it may submit steps."""

    def __init__(self) -> None:
        self.commands = SimpleNamespace(wake=None, fail=lambda error: None)
        self.pending: list[Any] = []
        self.pumps = 0

    def pump(self) -> None:
        self.pumps += 1

    def take_uncompiled(self) -> list[Any]:
        return []

    def stats(self) -> Stats:
        return Stats()

    def call(self, command: Any) -> Future[list[Any]]:
        promise: Future[list[Any]] = Future()
        promise.set_result([])
        return promise


def test_a_caller_that_asks_again_and_again_does_not_keep_the_steps_waiting() -> None:
    core, seen = FakeCore(), list[int]()
    done: Future[None] = Future()
    thread = CoreThread(core)  # type: ignore[arg-type]

    def ask(_: Any) -> None:
        seen.append(core.pumps)
        if len(seen) < 20:
            thread.send(Query(ask, Future()))
        else:
            done.set_result(None)

    thread.send(Query(ask, Future()))
    done.result(timeout=30)
    thread.send_failure(CAUSE)
    thread.join()
    assert max(Counter(seen).values()) <= 2


class BrokenParent:
    """A parent to whom no reply to a command can be sent, as if an exception struck there. A rank fails afterwards."""

    def __init__(self, failure: Future[Cause]) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self._failure = failure

    def send(self, message: Any) -> None:
        if isinstance(message, CallDone):
            raise RuntimeError("injected")
        self._failure.set_result(CAUSE)  # else a loop that has lost the exception would wait for ever


def test_an_exception_while_a_caller_is_answered_ends_the_core() -> None:
    failure: Future[Cause] = Future()
    parent = BrokenParent(failure)
    process = CoreProcess(cast(Any, parent), cast(Any, FakeCore()), failure)
    parent.inbox.put(CallRanks(0, ResetPrefixCache()))
    with pytest.raises(RuntimeError):
        process.step_until_failure()


def test_a_rank_that_has_failed_before_the_loop_ends_it() -> None:
    failure: Future[Cause] = Future()
    failure.set_result(CAUSE)
    process = CoreProcess(cast(Any, BrokenParent(failure)), cast(Any, FakeCore()), failure)
    with refuses(EngineError, CAUSE.code):
        process.step_until_failure()


class FramedParent:
    """A parent that reads frames, and decodes them as a client does."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.messages: list[Any] = []
        self._decoder: FrameDecoder[Any] = FrameDecoder(FromCore)

    def send(self, message: Any) -> None:
        self.messages += self._decoder.feed(encode_frame(message))


def scored(id: str, positions: int) -> Output:
    """A first output with the logprobs of a prompt, with 20 alternatives: 301 bytes each."""
    one = TokenLogprobs(-1.2345678, 123456, list(range(100_000, 100_020)), [-1.23] * 20)
    return Output(id, [1], [None], prompt_logprobs=[one] * positions)


def deliver(monkeypatch: pytest.MonkeyPatch, outputs: list[Output]) -> tuple[list[list[Output]], list[str]]:
    """The outputs of each frame, under a limit of 64 KiB, and the requests that were aborted."""
    monkeypatch.setattr(framing, "MAX_FRAME", 1 << 16)
    aborted: list[str] = []
    core: Any = FakeCore()
    core.abort = aborted.extend
    parent = FramedParent()
    CoreProcess(cast(Any, parent), core, Future())._deliver(outputs)
    return [message.outputs for message in parent.messages], aborted


def test_outputs_that_no_frame_has_room_for_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [scored("a", 150), scored("b", 150), Output("c", [1], [None]), scored("d", 150)]
    frames, aborted = deliver(monkeypatch, given)
    assert [output for frame in frames for output in frame] == given and len(frames) == 3 and not aborted
    assert deliver(monkeypatch, []) == ([[]], [])


def test_an_output_that_is_too_large_by_itself_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, aborted = deliver(monkeypatch, [scored("a", 150), scored("b", 300)])
    ends = {output.id: output.error and output.error.code for frame in frames for output in frame}
    assert ends == {"a": None, "b": "message-too-large"} and aborted == ["b"]


def test_logprobs_that_cannot_be_sent_are_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit they can."""
    monkeypatch.setattr(framing, "MAX_FRAME", 1 << 16)
    monkeypatch.setattr(checks, "OTHER_BYTES", 1024)
    most = {20: 214, 0: 3072}
    for top, positions in most.items():
        checks.check_frame(request("a", [1] * positions, prompt_logprobs=top))
        with refuses(RequestError, "prompt-logprobs-too-large"):
            checks.check_frame(request("a", [1] * (positions + 1), prompt_logprobs=top))
    checks.check_frame(request("a", [1] * 100_000))
    frames, aborted = deliver(monkeypatch, [scored("a", most[20])])
    assert len(frames) == 1 and not aborted
