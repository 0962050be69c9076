"""The core in a process of its own: `python -m weft.client.process FD LIFELINE`, started by `client.remote`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from queue import Empty
from typing import Any

import msgspec

from weft import logs
from weft.client import memory
from weft.client.messages import Abort, Add, Begin, Broken, Outputs, Refused, Started, ToCore
from weft.core.engine import EngineCore
from weft.core.request import Output
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError
from weft.executors import create
from weft.executors.causes import cause_of
from weft.executors.launch import Parent
from weft.planner.memory import fit_length

LARGE_TOKENS = 50_000  # prompt tokens of one message, whose memory is given back afterwards


class CoreProcess:
    """One loop over one queue: what the client says, steps that have ended, a rank that has failed."""

    def __init__(self, parent: Parent[ToCore], core: EngineCore) -> None:
        self.parent = parent
        self.core = core
        self._tidying = memory.Tidying(time.monotonic)
        self._large: set[str] = set()  # requests that came in large messages

    def run(self) -> None:
        """Until a rank fails: raises EngineError. Asleep while there is nothing to do."""
        while True:
            self._take(self._wait())
            while (event := self._next()) is not None:
                self._take(event)
            outputs: list[Output] = []
            while self.core.pending and self.core.pending[0].done():
                outputs += self.core.finish_oldest()
            self._forget(output.id for output in outputs if output.finish_reason is not None)
            # The ranks first: they compute while the client hears of the last step.
            self._pump()
            self.parent.send(Outputs(outputs, self.core.stats()))

    def _wait(self) -> Any:
        """The next event. Memory of requests that brought much is given back meanwhile."""
        while True:
            self._tidying.tidy()
            with suppress(Empty):
                return self.parent.inbox.get(timeout=self._tidying.wait_s)

    def _forget(self, ids: Iterable[str]) -> None:
        """Note that requests have ended. After the last large one memory is given back."""
        if self._large:
            self._large.difference_update(ids)
            if not self._large:
                self._tidying.later()

    def _pump(self) -> None:
        known = len(self.core.pending)
        self.core.pump()
        for future in islice(self.core.pending, known, None):
            future.add_done_callback(self.parent.inbox.put)

    def _next(self) -> Any:
        try:
            return self.parent.inbox.get_nowait()
        except Empty:
            return None

    def _take(self, event: Any) -> None:
        match event:
            case Add(requests):
                if sum(len(request.prompt) for request in requests) > LARGE_TOKENS:
                    self._large.update(request.id for request in requests)
                for request in requests:
                    try:
                        self.core.add(request)
                    except QueueFullError as error:
                        self._forget([request.id])
                        self.parent.send(Refused(request.id, str(error), True))
                    except RequestError as error:
                        self._forget([request.id])
                        self.parent.send(Refused(request.id, str(error), False, error.param))
            case Abort(ids):
                self.core.abort(ids)
                self._forget(ids)
            case Cause():
                raise EngineError(event)


def main(descriptor: int) -> None:
    # Without its lifeline: it takes the moment to see its ranks go. They have their own.
    memory.limit_arenas()
    parent: Parent[ToCore] = Parent(descriptor, ToCore)
    logs.configure()
    begin = parent.inbox.get()
    assert isinstance(begin, Begin)
    phase = "start"
    try:
        # A process of its own for each rank, be it the only one: this one stays without torch, and awake.
        executor = create(begin.config.executor or "processes", begin.worker)
        parent.farewell = executor.close
        ready = executor.start(begin.plan)
        phase = "allocate"
        plan = msgspec.structs.replace(begin.plan, max_model_len=fit_length(begin.plan, ready.num_blocks))
        core = EngineCore.start(plan, ready.num_blocks, executor, begin.config, paced=True)
        parent.send(Started(plan, ready))
        phase = "step"
        executor.failure.add_done_callback(lambda failure: parent.inbox.put(failure.result()))
        gc.freeze()  # what is there by now stays
        CoreProcess(parent, core).run()
    except Exception as error:
        parent.send(Broken(cause_of(error, CORE, phase)))
    parent.end()


if __name__ == "__main__":
    main(int(sys.argv[1]))
