"""serve: from a config to a server that answers, and to its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import uvicorn

from weft.client import memory
from weft.client.frontend import Frontend, TextTools
from weft.client.opening import open_model
from weft.client.remote import AsyncEngine
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.executors.base import Ready
from weft.formats.checkpoint import Checkpoint
from weft.hardware.host import Host, probe
from weft.plan.memory import capacity_lines
from weft.plan.plan import Plan
from weft.planner.execution import plan_to_run, seen
from weft.serving import listen
from weft.serving.admission import Admission, ConnectionLimits, fit_to_files, raise_file_limit
from weft.serving.app import app
from weft.serving.connection import Connection
from weft.serving.foreseen import Foreseen
from weft.serving.options import ServeOptions
from weft.serving.service import Service
from weft.serving.stopping import bounded_stop, drain, lift_bound

if TYPE_CHECKING:
    from weft.planner.forecast import Forecast
    from weft.probes.speeds import Speeds

log = logging.getLogger("weft.serving")

# What uvicorn says looks as what we say.
logging.getLogger("uvicorn").parent = log
# What is our intent, and uvicorn takes for an oversight: a failed stream that is cut, and a client too slow for CUT_S.
INTENDED = ("without completing response", "timeout graceful shutdown exceeded")
logging.getLogger("uvicorn.error").addFilter(lambda record: not any(part in record.getMessage() for part in INTENDED))

CUT_S = 1  # what connections get to take their last bytes, once they are to end
STATS_S = 10.0


def serve(config: EngineConfig, options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, and then until the running requests have ended.

    Raises ConfigError, ModelError, PlanError and EngineError where it cannot start, EngineError when the
    engine dies, and KeyboardInterrupt for Ctrl-C while it starts, or for a second one while requests end.
    """
    began = time.monotonic()
    memory.limit_arenas()
    listen.check_tls(options)
    with listen.bind(options) as listener:
        # Not in the loop: a download must end with Ctrl-C, and a thread would not.
        checkpoint, text_tools = open_model(config)
        log.info("found %s: %s (%.2f s)", config.model, checkpoint.path, time.monotonic() - began)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:  # whose end waits for threads
                runner.run(_serve(config, options, checkpoint, text_tools, listener, began))
        finally:
            lift_bound()


async def _serve(
    config: EngineConfig,
    options: ServeOptions,
    checkpoint: Checkpoint,
    text_tools: TextTools,
    listener: socket.socket,
    began: float,
) -> None:
    files = raise_file_limit()
    host = probe()
    plan = plan_to_run(config, checkpoint, host)
    known = None if options.disable_log_stats else _seen(plan, host)
    # While the engine starts, which takes longer: all is there to tell before the first request comes.
    foreseeing = asyncio.create_task(asyncio.to_thread(_foresee, plan, host, known)) if known else None
    starting = time.monotonic()
    engine = await AsyncEngine.start(plan, config)
    try:
        for line in capacity_lines(plan, engine.ready.num_blocks):
            log.info(line)
        expected = await foreseeing if foreseeing else None
        if expected:
            log.info(_beside(expected, engine.ready))
        frontend = Frontend.for_engine(config, checkpoint, text_tools, max_model_len=engine.plan.max_model_len)
        log.info("the engine is ready (%.2f s)", time.monotonic() - starting)
        capacity = config.max_num_seqs + config.max_num_queued_reqs
        service = Service(engine, frontend, options, model=config.model, capacity=capacity)
        service.foreseen = Foreseen(expected) if expected else None
        # A few of the longest bodies can always be on their way at once.
        held_bytes = max(ConnectionLimits.held_bytes, 4 * service.body_bytes)
        limits = fit_to_files(ConnectionLimits(held_bytes=held_bytes), files)
        if limits.connections < capacity:
            log.warning(
                "at most %d connections are served, for no more than %d files may be open; raise `ulimit -n`",
                limits.connections,
                files,
            )
        server = Server(service, listener, engine.died, limits)
        address = listen.address(listener, options)
        listen.begin(listener, options)
        gc.freeze()  # what is there by now stays, and no answer waits until it has been looked through
        log.info("serving %s at %s (%.2f s)", ", ".join(service.names), address, time.monotonic() - began)
        await server.until_ended()
        failure = engine.failure
    finally:
        await engine.close()
    if failure is not None:
        raise failure


class Server(uvicorn.Server):
    """uvicorn, with our own connections, and our own idea of an end: readiness first, then the running requests, then
    the sockets."""

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        ended: Callable[[], Awaitable[object]],
        limits: ConnectionLimits,
    ) -> None:
        """`ended` waits for the end of the engine."""
        options = service.options
        super().__init__(
            uvicorn.Config(
                app(service),
                ws="none",
                lifespan="off",
                root_path=options.root_path,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                server_header=False,
                date_header=False,  # it would be renewed once a second; `app` adds it
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_keep_alive=limits.keepalive_s,  # type: ignore[arg-type]  # a fraction does too
                timeout_graceful_shutdown=CUT_S,
            )
        )
        self._service = service
        self._listener = listener
        self._ended = ended
        self._limits = limits
        self._drain: asyncio.Task[None] | None = None
        self._patience: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._interrupted = False

    async def until_ended(self) -> None:
        """Serve until a signal, or the engine's death."""
        beside = [asyncio.create_task(self._watch())]
        if not self._service.options.disable_log_stats:
            beside.append(asyncio.create_task(_log_stats(self._service)))
        try:
            with bounded_stop(self._on_signal, self._service.options.shutdown_timeout):
                await self.serve(sockets=[self._listener])
        finally:
            for task in beside:
                task.cancel()
        if self._interrupted:
            raise KeyboardInterrupt

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of our kind; a TLS handshake gets the time of a head."""
        made = partial(Connection, Admission(self._limits), self.config, self.server_state, self.lifespan.state)
        loop = asyncio.get_running_loop()
        tls = self.config.ssl
        server = await loop.create_server(
            lambda: made(loop),
            sock=self._listener,
            ssl=tls,
            ssl_handshake_timeout=self._limits.head_s if tls else None,
            backlog=listen.BACKLOG,
        )
        self.servers = [server]
        self.started = True

    async def main_loop(self) -> None:
        """Sleep until the end; uvicorn's own looks ten times a second whether it has come."""
        await self._leaving.wait()

    def leave(self) -> None:
        """Close the connections and end; what runs is cut off."""
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are ours."""
        yield

    def _on_signal(self, number: signal.Signals, at_s: float) -> None:
        """The first lets requests end, the second cuts them off, the third does not even wait until they know."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._end(number, at_s))
            return
        self.force_exit, self._interrupted = self._interrupted, True
        if self._patience is not None:
            self._patience.cancel()

    async def _end(self, number: signal.Signals, at_s: float) -> None:
        """Take nothing new, let what runs end, as long as that may take, and stop."""
        service, limit = self._service, self._service.options.shutdown_timeout
        service.draining = True
        if service.answers:
            again = "Ctrl-C again" if number == signal.SIGINT else f"another {number.name}"
            log.info(
                "%s: stopping; %d requests still run, and get up to %g s; %s stops at once",
                number.name,
                len(service.answers),
                limit,
                again,
            )
        else:
            log.info("%s: stopping; no request runs", number.name)
        self._patience = asyncio.create_task(drain(service, at_s + limit))
        await asyncio.wait({self._patience})
        if service.answers:
            log.warning("requests cut off: %d", len(service.answers))
            for answer in service.answers:
                answer.cut_off()
        self.leave()

    async def _watch(self) -> None:
        """A dead engine ends the server; its requests have failed with the cause."""
        await self._ended()
        self._service.draining = True
        self.leave()


async def _log_stats(service: Service) -> None:
    """A line every so often while there is something to tell."""
    before = service.engine.stats
    while True:
        await asyncio.sleep(STATS_S)
        now = service.engine.stats
        if now.steps != before.steps:
            rates = [
                (getattr(now, name) - getattr(before, name)) / STATS_S
                for name in ("prompt_tokens", "generation_tokens")
            ]
            log.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, %d running, %d waiting, KV cache %.1f %% used, "
                "prefix cache %.1f %% hits",
                *rates,
                now.running,
                now.waiting,
                100 * now.blocks_used / max(1, now.blocks_total),
                100 * now.prefix_hits / max(1, now.prefix_queries),
            )
        before = now


def _foresee(plan: Plan, host: Host, known: Speeds) -> Forecast | None:
    from weft.planner.forecast import forecast

    try:
        return forecast(plan, host, known)
    except (ConfigError, PlanError) as error:  # a GPU that nobody knows
        log.info("no predictions: %s", error)
        return None


def _beside(expected: Forecast, ready: Ready) -> str:
    """What the ranks reported, beside what the planner expected of them."""
    from weft.planner.forecast import started

    return started(expected, ready.ranks, ready.num_blocks)


def _seen(plan: Plan, host: Host) -> Speeds | None:
    try:
        return seen(plan, host)
    except ConfigError as error:
        log.info("no predictions: %s", error)
        return None


def _loop_factory() -> Callable[[], Any] | None:
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
