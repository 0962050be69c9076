"""serve(): open the model, start the engine, serve HTTP and shut down in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from weft import logs
from weft.api.batches.keeper import BatchKeeper
from weft.api.observe.predicted import PredictionCheck
from weft.api.observe.tracing import check_tracing, request_spans
from weft.api.server.app import create_app
from weft.api.server.stopping import cancel_exit_deadline, drain, handle_stop_signals
from weft.api.service.run_files import announced
from weft.api.service.service import Service
from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster.assembly import AnyAssembly, assemble
from weft.engine.executors.base import StartResult
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.text_tools import TextTools
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.opening import open_model, plan_engines
from weft.engine.replicas.replicas import start_engine
from weft.engine.replicas.running import RunningReplica
from weft.errors import ConfigError, PlanError
from weft.formatting import join_commas, still_running
from weft.http import listen
from weft.http.admission import ConnectionLimits, fit_to_files, raise_file_limit
from weft.http.certificate import CertificateFiles
from weft.http.clients import Clients
from weft.http.options import ServeOptions
from weft.http.server import HttpServer, loop_factory
from weft.machine.hardware import malloc
from weft.machine.hardware.host import Host, probe_host
from weft.plan.memory import capacity_lines
from weft.plan.plan import Plan
from weft.planner.execution.execution import measured_speeds
from weft.planner.execution.replicas import ReplicaPlan

if TYPE_CHECKING:
    from weft.planner.execution.forecast import Forecast
    from weft.probes.stored_speeds import Speeds

log = logging.getLogger("weft.serving")

STATS_S = 10.0


def serve(config: EngineConfig, options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then until the running requests have ended.

    Raises ConfigError, ModelError, PlanError and EngineError if it cannot start, and EngineError if the engine dies.
    Raises KeyboardInterrupt for Ctrl-C during the start, or for a second one while requests end.
    """
    began = time.monotonic()
    logs.use_format(options.log_format)
    malloc.limit_arenas()
    listen.check_tls(options)
    check_keys(config, options)
    check_tracing(options)
    with listen.bind(options) as listener:
        options = listen.bound_options(listener, options)
        listen.warn_without_key(listener, options, has_keys=Clients(options).required)
        # Outside the event loop: Ctrl-C must end a download, and it would not end a thread.
        checkpoint, text_tools = open_model(config)
        log.info("found %s: %s (%.2f s)", config.model, checkpoint.path, time.monotonic() - began)
        host = probe_host()
        assembly = assemble(config, checkpoint, host, lasting=True)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:  # closing it waits for threads
                runner.run(_serve(config, options, checkpoint, text_tools, host, assembly, listener, began))
        finally:
            cancel_exit_deadline()


def check_keys(config: EngineConfig, options: ServeOptions) -> None:
    """Raise ConfigError for a faulty file of keys, and for weights without effect."""
    weighted = Clients(options).weighted
    if weighted is not None and config.scheduling_policy != "fair":
        raise ConfigError(
            f"weight of the key {weighted!r} is its share under --scheduling-policy fair; give that, or leave weight "
            "out",
            code="weight-without-policy",
        )
    if options.open_listing and not Clients(options).required:
        raise ConfigError(
            "--open-listing opens what keys close; give --api-key-file or --api-key, or leave it out",
            code="listing-without-keys",
        )


async def _serve(
    config: EngineConfig,
    options: ServeOptions,
    checkpoint: Checkpoint,
    text_tools: TextTools,
    host: Host,
    assembly: AnyAssembly | None,
    listener: socket.socket,
    began: float,
) -> None:
    files = raise_file_limit()
    planned = plan_engines(config, checkpoint, host, assembly, whole=True)
    # Predictions are for one machine.
    speeds = None if options.disable_log_stats or assembly else _machine_speeds(planned[0].plan, host)
    # While the engine starts, which takes longer: both are ready before the first request.
    predicting = asyncio.create_task(asyncio.to_thread(_predict, planned, speeds)) if speeds else None
    asyncio.get_running_loop().run_in_executor(None, text_tools.prepare_vocabulary)
    warming = asyncio.create_task(text_tools.warm())
    starting = time.monotonic()
    if len(planned) > 1:
        _log_replicas(planned)
    nodes = EngineNodes(config, checkpoint, assembly, planned) if assembly else None
    engine = await start_engine(planned, config, stall_s=options.progress_timeout, nodes=nodes)
    try:
        expected = await predicting if predicting else []
        await warming
        _log_engines(engine.replicas, planned, expected)
        frontend = Frontend.for_engine(config, checkpoint, text_tools, max_model_len=engine.plan.max_model_len)
        ready = "the engine is" if len(planned) == 1 else f"{len(planned)} replicas are"
        log.info("%s ready (%.2f s)", ready, time.monotonic() - starting)
        capacity = sum(one.plan.max_running for one in planned) + config.max_num_queued_reqs
        service = Service(engine, frontend, options, model=config.model, capacity=capacity)
        # The planner has no prediction for several replicas together.
        service.monitor.forecasts, service.monitor.caching = expected, config.enable_prefix_caching
        service.prediction_check = PredictionCheck(expected[0]) if len(expected) == 1 else None
        service.prefill_tok_s = sum(map(_prefill_speed, expected)) or None
        server = ServingServer(service, listener, engine.died, _connection_limits(service, capacity, files))
        address = listen.public_url(listener, options)
        listen.start_listening(listener, options)
        gc.freeze()  # objects that exist now stay, so the collector need not scan them
        level = logging.INFO if options.announces else logging.DEBUG  # clients of a set know one address
        log.log(level, "serving %s at %s (%.2f s)", ", ".join(service.names), address, time.monotonic() - began)
        run_file = announced(service.names, address, service.checkpoints) if options.announces else nullcontext()
        with run_file, request_spans(options, service.names[0]) as service.spans:
            await server.until_ended()
        failure = engine.failure
    finally:
        await engine.close()
    if failure is not None:
        raise failure


def _log_engines(
    replicas: Sequence[RunningReplica], planned: Sequence[ReplicaPlan], expected: Sequence[Forecast]
) -> None:
    """Log the capacity of each engine, and how its start compares with the prediction."""
    for replica in replicas:
        if len(planned) > 1:
            log.info("replica %d:", replica.number)
        for line in capacity_lines(planned[replica.number].plan, replica.ready.num_blocks):
            log.info(line)
        if expected:
            log.info(_compare_start(expected[replica.number], replica.ready))


def _connection_limits(service: Service, capacity: int, files: int) -> ConnectionLimits:
    """Limits with room for a few bodies of the maximum size at once, within the number of open files."""
    held_bytes = max(ConnectionLimits.held_bytes, 4 * service.body_bytes)
    limits = fit_to_files(ConnectionLimits(held_bytes=held_bytes), files)
    if limits.connections < capacity:
        log.warning(
            "at most %d connections are served, because no more than %d files may be open; raise `ulimit -n`",
            limits.connections,
            files,
        )
    return limits


class ServingServer(HttpServer):
    """The server of one engine. It ends in order: readiness first, then running requests, then sockets."""

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        ended: Callable[[], Awaitable[object]],
        limits: ConnectionLimits,
    ) -> None:
        """`ended` returns when the engine has ended."""
        options = service.options
        application = create_app(service)
        super().__init__(
            application,
            listener,
            limits,
            root_path=options.root_path,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
        )
        self._service = service
        service.monitor.unread_s = self.admission.unread_s
        self.batches: BatchKeeper = application.state.batches
        self._ended = ended
        self._shutdown: asyncio.Task[None] | None = None
        self._draining_requests: asyncio.Task[None] | None = None
        self._interrupted = False

    async def until_ended(self) -> None:
        """Serve until a signal or the death of the engine."""
        self.batches.resume()
        tasks = [asyncio.create_task(self._watch_engine())]
        options = self._service.options
        if options.enable_ssl_refresh and options.ssl_certfile is not None:
            self.config.load()  # creates the context, which `serve` would do later
            assert self.config.ssl is not None
            files = CertificateFiles(options.ssl_certfile, options.ssl_keyfile)
            tasks.append(asyncio.create_task(files.renew_forever(self.config.ssl)))
        if not options.disable_log_stats:
            tasks.append(asyncio.create_task(_log_stats(self._service)))
        try:
            with handle_stop_signals(self._on_signal, self._service.options.shutdown_timeout):
                await self.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            await self.batches.close()
        if self._interrupted:
            raise KeyboardInterrupt

    def _on_signal(self, number: signal.Signals, at_s: float) -> None:
        """First signal: drain. Second: cut requests off. Third: do not even wait for their connections."""
        if self._shutdown is None:
            self._shutdown = asyncio.create_task(self._shut_down(number, at_s))
            return
        self.force_exit, self._interrupted = self._interrupted, True
        if self._draining_requests is not None:
            self._draining_requests.cancel()

    async def _shut_down(self, number: signal.Signals, at_s: float) -> None:
        """Refuse new requests, let running ones end within the shutdown timeout, and stop."""
        service, limit = self._service, self._service.options.shutdown_timeout
        service.draining = True
        if service.streams:
            again = "Ctrl-C again" if number == signal.SIGINT else f"another {number.name}"
            log.info(
                "%s: stopping; %s, and up to %g s are left for that; %s stops at once",
                number.name,
                still_running(len(service.streams)),
                limit,
                again,
            )
        else:
            log.info("%s: stopping; no request runs", number.name)
        self._draining_requests = asyncio.create_task(drain(service, at_s + limit))
        await asyncio.wait({self._draining_requests})
        if service.streams:
            count = len(service.streams)
            log.warning("requests cut off: %d", count, extra=logs.event_fields("requests-cut-off", requests=count))
            for stream in service.streams:
                stream.cut_off()
        self.leave()

    async def _watch_engine(self) -> None:
        """End the server when the engine dies; its requests have failed with the cause."""
        await self._ended()
        self._service.draining = True
        self.leave()


async def _log_stats(service: Service) -> None:
    """Log throughput and cache use every STATS_S seconds in which a step finished, and what the diagnosis finds."""
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
            await service.monitor.refresh()
        before = now


def _log_replicas(planned: Sequence[ReplicaPlan]) -> None:
    """Log the devices of each replica."""
    for number, (plan, _, weight) in enumerate(planned):
        cores = sorted({core for cores in plan.cores for core in cores})
        where = f"cores {join_commas(cores)}" if plan.on_cpu else ", ".join(device.name for device in plan.devices)
        share = f", {weight:.2f} of the speed of replica 0" if weight != planned[0].weight else ""
        log.info("replica %d of %d: %d ranks on %s%s", number, len(planned), len(plan.places), where, share)


def _predict(planned: Sequence[ReplicaPlan], speeds: Speeds) -> list[Forecast]:
    """The planner's predictions for each replica on this machine; none for hardware that the planner does not know."""
    from weft.planner.execution.forecast import forecast_plan

    try:
        return [forecast_plan(plan, host, speeds) for plan, host, _ in planned]
    except (ConfigError, PlanError) as error:  # an unknown GPU
        log.info("no predictions: %s", error)
        return []


def _prefill_speed(expected: Forecast) -> float:
    """Predicted tokens per second of a prompt that fills a step."""
    tokens = min(expected.plan.max_num_batched_tokens, expected.plan.max_model_len // 2)
    return tokens / expected.speed(tokens, 1).ttft_s


def _compare_start(expected: Forecast, ready: StartResult) -> str:
    """Log line that compares the ranks' reports at the start with the prediction."""
    from weft.planner.execution.forecast import start_report

    return start_report(expected, ready.ranks, ready.num_blocks)


def _machine_speeds(plan: Plan, host: Host) -> Speeds | None:
    """Measured or known speeds of this machine; None if there are none."""
    try:
        return measured_speeds(plan, host)
    except ConfigError as error:
        log.info("no predictions: %s", error)
        return None
