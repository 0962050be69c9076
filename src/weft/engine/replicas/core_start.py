"""Start of the core's process: a new interpreter, or a fork of the fork server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from weft.engine.processes.fork_client import ForkClient
from weft.engine.processes.launch import Child, end_children
from weft.engine.replicas.messages import FromCore

MODULE = "weft.engine.replicas.process"


async def start_core(files: Iterable[int], forks: ForkClient | None) -> Child[FromCore]:
    """Start the core's process, which inherits `files`. May be cancelled.

    `forks`, which no other process uses at this time, forks it if it can: no module is imported again.
    """
    if forks is None:
        return Child(MODULE, FromCore, files=files)
    forks.reclaim()
    starting: asyncio.Task[Child[FromCore]] = asyncio.create_task(
        # In a thread, since a server that is stopped has to be waited for.
        asyncio.to_thread(Child, MODULE, FromCore, env=forks.environment, files=files, server=forks)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        child = await starting
        await asyncio.to_thread(end_children, [child], 0.0)
        child.close()
        raise
