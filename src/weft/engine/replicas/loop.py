"""CoreLoop: the loop that steps an EngineCore, in a thread or in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from queue import SimpleQueue
from typing import Any

from weft.engine.core.engine import EngineCore
from weft.engine.core.request import Output


class CoreLoop(ABC):
    """One thread that owns a core, with one inbox of events.

    Events are callers' messages, causes of failure, and the futures of finished steps and commands, which only wake the
    loop. A future's callback is `inbox.put` itself, in which nothing of Python runs: a future logs and drops what a
    callback raises, and the loop would never wake.
    """

    def __init__(self, core: EngineCore, inbox: SimpleQueue[Any]) -> None:
        self.core = core
        self.inbox = inbox
        core.commands.wake = inbox.put
        core.wake = inbox.put

    def step_until_failure(self) -> None:
        """Step the core until an exception ends the loop. Sleeps while the inbox is empty; never waits for a step."""
        while True:
            self._handle_event(self._wait())
            # Only calls that have come by now: a caller that asks again and again does not keep the steps waiting.
            for _ in range(self.inbox.qsize()):
                self._handle_event(self.inbox.get_nowait())
            outputs: list[Output] = []
            while self.core.pending and self.core.pending[0].done():
                outputs += self.core.finish_oldest()
            # The ranks first: they compute while the callers receive the last step's outputs.
            self._pump()
            self._deliver(outputs + self.core.take_uncompiled())

    def _wait(self) -> Any:
        """Sleep until the next event."""
        return self.inbox.get()

    @abstractmethod
    def _handle_event(self, event: Any) -> None:
        """Handle one event. An exception ends the loop."""

    @abstractmethod
    def _deliver(self, outputs: list[Output]) -> None:
        """Pass on the outputs of one round of the loop; the list may be empty."""

    def _pump(self) -> None:
        """Submit steps, and have the future of each come back as an event when the step has finished."""
        first_new = len(self.core.pending)
        self.core.pump()
        for future in islice(self.core.pending, first_new, None):
            future.add_done_callback(self.inbox.put)
