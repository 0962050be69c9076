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
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import uvicorn

from weft.client.frontend import Frontend, Words
from weft.client.remote import AsyncEngine
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.executors.base import Ready
from weft.facts.checkpoint import Checkpoint, resolve
from weft.facts.host import Host, probe
from weft.planner.execution import plan_to_run, seen
from weft.planner.memory import capacity_lines
from weft.planner.plan import Plan
from weft.serving import listen, memory
from weft.serving.app import app
from weft.serving.foreseen import Foreseen
from weft.serving.options import ServeOptions
from weft.serving.service import Service

if TYPE_CHECKING:
    from weft.facts.speeds import Speeds
    from weft.planner.forecast import Forecast

log = logging.getLogger("weft.serving")

# What uvicorn says looks as what we say.
logging.getLogger("uvicorn").parent = log
# Cutting a stream that has failed is our intent; uvicorn takes it for an oversight and says so.
logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in record.getMessage())

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
        checkpoint = resolve(
            config.model,
            revision=config.revision,
            hf_token=config.hf_token,
            download_dir=config.download_dir,
            load_format=config.load_format,
        )
        words = Words.load(config, checkpoint)
        log.info("found %s: %s (%.2f s)", config.model, checkpoint.path, time.monotonic() - began)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(config, options, checkpoint, words, listener, began))


async def _serve(
    config: EngineConfig,
    options: ServeOptions,
    checkpoint: Checkpoint,
    words: Words,
    listener: socket.socket,
    began: float,
) -> None:
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
        frontend = Frontend.of(config, checkpoint, words, max_model_len=engine.plan.max_model_len)
        log.info("the engine is ready (%.2f s)", time.monotonic() - starting)
        capacity = config.max_num_seqs + config.max_num_queued_reqs
        service = Service(engine, frontend, options, model=config.model, capacity=capacity)
        service.foreseen = Foreseen(expected) if expected else None
        server = Server(service, listener, engine.died)
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
    """uvicorn, with our own idea of an end: readiness first, then the running requests, then the sockets."""

    def __init__(self, service: Service, listener: socket.socket, ended: Callable[[], Awaitable[object]]) -> None:
        """`ended` waits for the end of the engine."""
        options = service.options
        super().__init__(
            uvicorn.Config(
                app(service),
                http="httptools" if find_spec("httptools") else "h11",
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
                timeout_graceful_shutdown=CUT_S,
            )
        )
        self._service = service
        self._listener = listener
        self._ended = ended
        self._drain: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self._interrupted = False

    async def until_ended(self) -> None:
        """Serve until a signal, or the engine's death."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        beside = [asyncio.create_task(self._watch())]
        if not self._service.options.disable_log_stats:
            beside.append(asyncio.create_task(_log_stats(self._service)))
        try:
            await self.serve(sockets=[self._listener])
        finally:
            for task in beside:
                task.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self._interrupted:
            raise KeyboardInterrupt

    async def main_loop(self) -> None:
        """Sleep until the end; uvicorn's own looks ten times a second whether it has come."""
        await self._leaving.wait()

    def _leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are ours."""
        yield

    def _on_signal(self, number: int) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._end(signal.Signals(number).name))
        else:
            self._interrupted = self.force_exit = True
            self._leave()

    async def _end(self, why: str) -> None:
        """Take nothing new, let what runs end, as long as that may take, and stop."""
        self._service.draining = True
        limit = self._service.options.shutdown_timeout
        log.info("%s: ending; requests that run: %d, for up to %g s", why, len(self._service.answers), limit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._service.idle.wait()
        if self._service.answers:
            log.warning("%d requests are cut off", len(self._service.answers))
            for answer in self._service.answers:
                answer.cut_off()
        self._leave()

    async def _watch(self) -> None:
        """A dead engine ends the server; its requests have failed with the cause."""
        await self._ended()
        self._service.draining = True
        self._leave()


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
