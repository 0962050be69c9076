"""Unloading: at the request of a client of Ollama's API, a server's engine sleeps until the next request."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weft.engine.core.commands import Command, Sleep, Wake
from weft.errors import WeftError
from weft.logs import event_fields

if TYPE_CHECKING:
    from weft.api.service.service import Service

log = logging.getLogger("weft.serving")

LEVEL = 1  # of sleep: the weights stay in the host's memory, so that the next request waits for a copy only


class Unloading:
    """State of an engine that clients may put to sleep. An administrator's /sleep is not ended by clients."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()
        self.unloaded = False

    @property
    def sleeps(self) -> bool:
        """True if the model is not awake, for whatever reason."""
        return self.unloaded or bool(self._service.engine.stats.sleep_level)

    def unload(self) -> None:
        """Send the engine to sleep, unless it sleeps, requests run or the server ends."""
        if self.sleeps or self._service.streams or self._service.draining or self._service.engine.outage:
            return
        self.unloaded = True
        log.info("the model is unloaded (keep_alive is 0), until the next request", extra=event_fields("unloaded"))
        self._call(Sleep(LEVEL))

    def load(self) -> bool:
        """Wake the engine if a client has put it to sleep; requests wait in its queue until then.

        Return True while it wakes.
        """
        if self.unloaded:
            self.unloaded = False
            self._call(Wake())
        return bool(self._tasks)

    def _call(self, command: Command) -> None:
        """Have the engine run a command after its queued commands: Sleep and Wake keep their order."""
        task = asyncio.create_task(self._run_command(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_command(self, command: Command) -> None:
        try:
            await self._service.engine.call(command)
        except WeftError as error:  # an administrator was faster, or the engine has died, which others report
            log.warning("%s: %s", command.phase, error)
        if isinstance(command, Wake):
            self._service.note_awake()
