"""The core in a process of its own: `python -m weft.client.process FD LIFELINE`, started by `client.remote`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty
from typing import Any

import msgspec

from weft import logs
from weft.client import memory
from weft.client.loop import CoreLoop
from weft.client.messages import Abort, Add, Begin, Broken, Outputs, Refused, Started, ToCore
from weft.core.engine import EngineCore
from weft.core.request import Output
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError
from weft.executors import create_executor
from weft.executors.causes import cause_of
from weft.executors.launch import Parent
from weft.plan.memory import fit_length

LARGE_TOKENS = 50_000  # prompt tokens of one message, whose memory is given back afterwards


class CoreProcess(CoreLoop):
    """The loop in its process: takes the client's messages and sends what the steps bring."""

    def __init__(self, parent: Parent[ToCore], core: EngineCore) -> None:
        super().__init__(core, parent.inbox)
        self.parent = parent
        self._tidying = memory.Tidying(time.monotonic)
        self._large: set[str] = set()  # requests that came in large messages

    def _deliver(self, outputs: list[Output]) -> None:
        self._forget(output.id for output in outputs if output.finish_reason is not None)
        self.parent.send(Outputs(outputs, self.core.stats()))

    def _wait(self) -> Any:
        # Asleep for no longer than until memory of large requests is to be given back.
        while True:
            self._tidying.tidy()
            with suppress(Empty):
                return self.inbox.get(timeout=self._tidying.wait_s)

    def _forget(self, ids: Iterable[str]) -> None:
        """Note that requests have ended. After the last large one memory is given back."""
        if self._large:
            self._large.difference_update(ids)
            if not self._large:
                self._tidying.later()

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
        executor = create_executor(begin.config.executor or "processes", begin.worker)
        parent.before_exit = executor.close
        ready = executor.start(begin.plan)
        phase = "allocate"
        plan = msgspec.structs.replace(begin.plan, max_model_len=fit_length(begin.plan, ready.num_blocks))
        core = EngineCore.start(plan, ready.num_blocks, executor, begin.config, paced=True)
        parent.send(Started(plan, ready))
        phase = "step"
        executor.failure.add_done_callback(lambda failure: parent.inbox.put(failure.result()))
        gc.freeze()  # what is there by now stays
        CoreProcess(parent, core).step_until_failure()
    except Exception as error:
        parent.send(Broken(cause_of(error, CORE, phase)))
    parent.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
