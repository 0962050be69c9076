"""The core in a process of its own: `python -m weft.engine.replicas.process FD LIFELINE`, started by
`engine.replicas.remote`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty
from typing import Any

import msgspec

from weft import logs
from weft.engine.core.commands import Replies
from weft.engine.core.engine import EngineCore
from weft.engine.core.request import Output, Request
from weft.engine.core.step import SlotFailure
from weft.engine.executors import create_executor
from weft.engine.executors.processes import ProcessExecutor
from weft.engine.processes.causes import cause_of
from weft.engine.processes.forks import pool
from weft.engine.processes.framing import FrameError
from weft.engine.processes.launch import Parent
from weft.engine.processes.lifeline import continue_with
from weft.engine.replicas import memory
from weft.engine.replicas.loop import CoreLoop
from weft.engine.replicas.messages import (
    AbortRequests,
    AddRequests,
    CallDone,
    CallRanks,
    CallRefused,
    CoreFailed,
    CoreStarted,
    RequestRefused,
    StartCore,
    StepOutputs,
    ToCore,
)
from weft.engine.structured.compiler import GrammarCompiler
from weft.engine.text.tokenizer import load_tokenizer
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError
from weft.machine.hardware import malloc
from weft.plan.memory import fit_length

LARGE_TOKENS = 50_000  # prompt tokens of a message from which on its memory is given back afterwards


class CoreProcess(CoreLoop):
    """The core's loop in its own process: takes the client's messages and sends the steps' outputs.

    `failure` is the executor's, with the cause of the end of a rank.
    """

    def __init__(self, parent: Parent[ToCore], core: EngineCore, failure: Future[Cause]) -> None:
        super().__init__(core, parent.inbox)
        self.parent, self._failure = parent, failure
        failure.add_done_callback(self.inbox.put)
        self._memory_release = memory.DelayedRelease(time.monotonic)
        self._large: set[str] = set()  # requests that came in large messages
        self._calls: dict[int, Future[Replies]] = {}  # commands, by the ids of their callers

    def _deliver(self, outputs: list[Output]) -> None:
        self._answer_calls()
        self._note_ended(output.id for output in outputs if output.finish_reason is not None)
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[Output]) -> None:
        """Send outputs, in several frames if one has no room for them.

        A request whose output is too large by itself ends with an error: the others go on.
        """
        try:
            self.parent.send(StepOutputs(outputs, self.core.stats()))
        except FrameError as error:
            if len(outputs) > 1:
                middle = len(outputs) // 2
                self._send_outputs(outputs[:middle])
                self._send_outputs(outputs[middle:])
                return
            (output,) = outputs
            failure = SlotFailure(error.code, str(error))
            self.parent.send(StepOutputs([Output(output.id, [], [], "error", error=failure)], self.core.stats()))
            if output.finish_reason is None:
                self.core.abort([output.id])
                self._note_ended([output.id])

    def _wait(self) -> Any:
        # The loop sleeps no longer than until the memory of large requests shall be given back.
        while True:
            self._memory_release.release_if_due()
            with suppress(Empty):
                return self.inbox.get(timeout=self._memory_release.wait_s)

    def _note_ended(self, ids: Iterable[str]) -> None:
        """Note that requests have ended. After the last large one, memory is given back."""
        if self._large:
            self._large.difference_update(ids)
            if not self._large:
                self._memory_release.schedule()

    def _handle_event(self, event: Any) -> None:
        match event:
            case AddRequests(requests):
                if sum(len(request.prompt) for request in requests) > LARGE_TOKENS:
                    self._large.update(request.id for request in requests)
                for request in requests:
                    self._add(request)
            case AbortRequests(ids):
                self.core.abort(ids)
                self._note_ended(ids)
            case CallRanks():
                self._call(event)
            case Future() if event is self._failure:
                raise EngineError(event.result())

    def _call(self, call: CallRanks) -> None:
        """Pass a command on."""
        try:
            self._calls[call.id] = self.core.call(call.command)
        except RequestError as error:
            self._refuse_call(call.id, error)

    def _refuse_call(self, id: int, error: RequestError) -> None:
        self.parent.send(CallRefused(id, str(error), error.code, error.param))

    def _answer_calls(self) -> None:
        """Send the replies that are there.

        The loop does so, and no callback of a future: an exception there would be logged, and the caller would wait
        without end. The replies of a command that has failed are never sent: the loop ends, and the cause fails all
        callers.
        """
        for id in [id for id, promise in self._calls.items() if promise.done()]:
            promise = self._calls.pop(id)
            if isinstance(error := promise.exception(), RequestError):
                self._refuse_call(id, error)
            else:
                self.parent.send(CallDone(id, promise.result(), self.core.stats()))

    def _add(self, request: Request) -> None:
        try:
            self.core.add(request)
        except QueueFullError as error:
            self._note_ended([request.id])
            self.parent.send(RequestRefused(request.id, str(error), error.code, True))
        except RequestError as error:
            self._note_ended([request.id])
            self.parent.send(RequestRefused(request.id, str(error), error.code, False, error.param))


def main(descriptor: int, lifeline: int) -> None:
    """Run the core, until its parent ends it. `descriptor` is its socket.

    The end of the parent's death pipe `lifeline` does not kill this process, which takes the time to end its ranks. If
    this process is stopped then, it goes on, and ends.
    """
    malloc.limit_arenas()
    continue_with(lifeline)
    parent: Parent[ToCore] = Parent(descriptor, ToCore)
    logs.configure()
    start = parent.inbox.get()
    assert isinstance(start, StartCore)
    phase = "start"
    if start.forks:
        pool.adopt(start.forks.descriptor, start.forks.pid)
    try:
        # Each rank gets a process of its own, even a single one: this process runs no torch, and stays responsive.
        executor = create_executor(start.config.executor or "processes", start.worker, start.others, start.stall_s)
        if isinstance(executor, ProcessExecutor):
            parent.sign = lambda: executor.state
        parent.before_exit = executor.close
        ready = executor.start(start.plan)
        phase = "allocate"
        plan = msgspec.structs.replace(start.plan, max_model_len=fit_length(start.plan, ready.num_blocks))
        grammars = GrammarCompiler(
            lambda: load_tokenizer(start.config.tokenizer or plan.checkpoint), plan.shape.vocab, plan.shape.eos
        )
        core = EngineCore.from_plan(plan, ready.num_blocks, executor, start.config, paced=True, grammars=grammars)
        parent.send(CoreStarted(plan, ready))
        phase = "step"
        gc.freeze()  # the objects that exist by now stay
        CoreProcess(parent, core, executor.failure).step_until_failure()
    except Exception as error:
        parent.send(CoreFailed(cause_of(error, CORE, phase)))
    parent.exit()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
