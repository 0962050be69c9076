"""HttpServer: uvicorn's server with Weft's bounded connections and shutdown, for any ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator
from functools import partial
from importlib.util import find_spec
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from weft.http import listen
from weft.http.admission import ConnectionAdmission, ConnectionLimits
from weft.http.connection import Connection

log = logging.getLogger("weft.serving")

# Gives uvicorn's log lines the form of Weft's.
logging.getLogger("uvicorn").parent = log
# uvicorn reports these as faults, but both are intended: cutting a failed stream, and a client slower than CUT_S.
INTENDED = ("without completing response", "timeout graceful shutdown exceeded")
logging.getLogger("uvicorn.error").addFilter(lambda record: not any(part in record.getMessage() for part in INTENDED))

CUT_S = 1  # time that connections get for their last bytes at shutdown


class HttpServer(uvicorn.Server):
    """Serves an application on a socket until the caller ends it with `leave`."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ConnectionLimits,
        *,
        root_path: str = "",
        ssl_keyfile: str | None = None,
        ssl_certfile: str | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                root_path=root_path,
                ssl_keyfile=ssl_keyfile,
                ssl_certfile=ssl_certfile,
                server_header=False,
                date_header=False,  # uvicorn would update it only once a second; `app` adds it
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_keep_alive=limits.keepalive_s,  # type: ignore[arg-type]  # fractions work too
                timeout_graceful_shutdown=CUT_S,
            )
        )
        self._listener = listener
        self._limits = limits
        self.admission = ConnectionAdmission(limits)
        self._exit_requested = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections as `Connection`s. A TLS handshake gets as much time as a request's head."""
        create_connection = partial(Connection, self.admission, self.config, self.server_state, self.lifespan.state)
        loop = asyncio.get_running_loop()
        tls = self.config.ssl
        beside = listen.bind_beside(self._listener)
        self.servers = [
            await loop.create_server(
                lambda: create_connection(loop),
                sock=listener,
                ssl=tls,
                ssl_handshake_timeout=self._limits.head_s if tls else None,
                backlog=listen.BACKLOG,
            )
            for listener in (self._listener, *((beside,) if beside else ()))
        ]
        self.started = True

    async def main_loop(self) -> None:
        """Sleep until shutdown; uvicorn's own loop polls ten times a second."""
        await self._exit_requested.wait()

    def leave(self) -> None:
        """Close all connections and end; running requests are cut off."""
        self.should_exit = True
        self._exit_requested.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: `handle_stop_signals` handles them."""
        yield


def loop_factory() -> Callable[[], Any] | None:
    """uvloop's event loop; None for asyncio's own if uvloop is not there."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
