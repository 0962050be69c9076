"""serve_set(): several models behind one address, each in a process of its own that starts its ranks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import closing

from weft import logs
from weft.api.server.stopping import cancel_exit_deadline, handle_stop_signals
from weft.api.service.run_files import announced
from weft.fleet.gateway.server import KEEPALIVE_S, GatewayServer
from weft.fleet.hosting.app import create_app
from weft.fleet.hosting.catalogue import Catalogue, SetFleet, look_up_entry
from weft.fleet.hosting.front import SetProxy, body_limit
from weft.fleet.hosting.keeper import Keeper
from weft.fleet.hosting.member import Member
from weft.fleet.hosting.model_set import ModelSet
from weft.fleet.hosting.options import check_options, member_words
from weft.fleet.hosting.residency import Residency
from weft.fleet.hosting.set_plan import SetPlan, device_rooms, plan_set
from weft.fleet.hosting.sockets import SocketFolder
from weft.fleet.upstreams.policy import POLICIES
from weft.formatting import format_bytes
from weft.http import listen
from weft.http.admission import ConnectionLimits, fit_to_files, raise_file_limit
from weft.http.certificate import RENEW_S
from weft.http.clients import Clients
from weft.http.options import ServeOptions
from weft.http.server import loop_factory
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.host import probe_host
from weft.probes import machine

log = logging.getLogger("weft.hosting")


def serve_set(models: ModelSet, options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then until the running requests have ended.

    Raises ConfigError, ModelError and PlanError before anything is started.
    """
    logs.use_format(options.log_format)
    for warning in models.warnings:
        log.warning("%s", warning)
    check_options(models, options)
    listen.check_tls(options)
    with listen.bind(options) as listener:
        options = listen.bound_options(listener, options)
        listen.warn_without_key(listener, options, has_keys=Clients(options).required)
        cluster = machine.probe_cluster()
        plan = plan_models(models, cluster)
        for model in plan.models:
            sizes = ", ".join(f"{format_bytes(size)} of {device}" for device, size in model.need.awake.items())
            log.info("%s: %s awake, by the plan", model.entry.name, sizes)
        try:
            with closing(SocketFolder()) as folder, asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(_serve_models(models, plan, cluster, options, listener, folder))
        finally:
            cancel_exit_deadline()


def plan_models(models: ModelSet, cluster: Cluster) -> SetPlan:
    """The plan of a set on this machine; fetched models are planned at their first request."""
    host_bytes = probe_host().memory_free_bytes
    if models.grows:
        return SetPlan(models=(), rooms=device_rooms(cluster, host_bytes))
    return plan_set(models, cluster, look_up_entry, host_bytes)


async def _serve_models(
    models: ModelSet,
    plan: SetPlan,
    cluster: Cluster,
    options: ServeOptions,
    listener: socket.socket,
    folder: SocketFolder,
) -> None:
    began = time.monotonic()
    keeper, proxy = create_front(models, plan, cluster, options, folder)
    limits = fit_to_files(
        # Half of the files: each connection of a client needs a connection to a model.
        ConnectionLimits(keepalive_s=KEEPALIVE_S, held_bytes=max(ConnectionLimits.held_bytes, 4 * body_limit(options))),
        raise_file_limit() // 2,
    )
    server = GatewayServer(
        proxy,
        listener,
        limits,
        options,
        options.shutdown_timeout,
        application=create_app(proxy),
        drain_upstreams=keeper.drain,  # the models' servers decide which of their requests can still end
    )
    address = listen.public_url(listener, options)
    names = [name for name, _ in proxy.catalogue.listed()]
    tasks = [asyncio.create_task(keeper.tick_forever())]
    if options.enable_ssl_refresh:
        tasks.append(asyncio.create_task(_renew_certificate(server)))
    listen.start_listening(listener, options)
    gc.freeze()  # objects that exist now stay, so the collector need not scan them
    tasks.append(asyncio.create_task(_load(keeper, models, names, address, began)))
    try:
        with announced(names, address), handle_stop_signals(server.on_signal, options.shutdown_timeout):
            await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        proxy.close()
        await keeper.close()


async def _renew_certificate(server: GatewayServer) -> None:
    """Check periodically for a replaced certificate."""
    while True:
        await asyncio.sleep(RENEW_S)
        server.reload_certificate()


async def _load(keeper: Keeper, models: ModelSet, names: Sequence[str], address: str, began: float) -> None:
    """Load the models that begin with the set, and log it."""
    await keeper.start([entry.name for entry in models.entries if entry.always])
    listed = ", ".join(names) or "the models that are fetched"
    log.info("serving %s at %s (%.2f s)", listed, address, time.monotonic() - began)


def create_front(
    models: ModelSet, plan: SetPlan, cluster: Cluster, options: ServeOptions, folder: SocketFolder
) -> tuple[Keeper, SetProxy]:
    """The keeper of a set's processes, none of which runs yet, and the proxy in front. Call it in the event loop."""
    fleet = SetFleet([], POLICIES["least_conn"](), time.monotonic)

    def create_member(name: str, names: Sequence[str]) -> Member:
        return Member(name, names, environment=os.environ, path=folder.new_path())

    keeper = Keeper(Residency(plan.rooms), fleet, create_member, argv=member_words(options))
    catalogue = Catalogue(models, keeper, cluster)
    fleet.catalogue = catalogue
    catalogue.take_plan(plan)
    return keeper, SetProxy(fleet, options, catalogue, keeper)
