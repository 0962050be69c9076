"""run_gateway(): bind, check the configuration against the machine, serve, and shut down in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address

from starlette.types import ASGIApp

from weft.api.server.stopping import cancel_exit_deadline, handle_stop_signals
from weft.errors import ConfigError, error_reason
from weft.fleet.accounts.keys import Keys
from weft.fleet.accounts.ledger import Ledger
from weft.fleet.accounts.prices import price_of
from weft.fleet.gateway.access_log import AccessLog
from weft.fleet.gateway.accounts import Accounts
from weft.fleet.gateway.app import create_app
from weft.fleet.gateway.bodies import BodyPool
from weft.fleet.gateway.metrics import GatewayMetrics
from weft.fleet.gateway.proxy import Proxy
from weft.fleet.upstreams.check_loop import CheckLoop, Looking
from weft.fleet.upstreams.config import GatewayConfig, UpstreamConfig, parse_url
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.policy import POLICIES
from weft.fleet.upstreams.ray_watch import RayWatch
from weft.fleet.upstreams.watched_file import WatchedFile
from weft.fleet.upstreams.watches import DnsWatch, FileWatch, FleetWatch, UpstreamKeys
from weft.formatting import counted, still_running
from weft.http import listen
from weft.http.admission import RESERVED_FILES, ConnectionLimits, fit_to_files, open_files, raise_file_limit
from weft.http.certificate import CertificateFiles
from weft.http.key_file import ClientKey, read_keys
from weft.http.options import ServeOptions
from weft.http.server import HttpServer, loop_factory
from weft.logs import event_fields

log = logging.getLogger("weft.gateway")

GARBAGE_OBJECTS = 50_000  # allocations between two collections; nearly all objects are freed without one
KEEPALIVE_S = 75.0  # nginx's default: clients keep their connections between requests


def run_gateway(config: GatewayConfig, admin_key: str | None, shutdown_timeout: float) -> None:
    """Serve until SIGTERM or Ctrl-C, then until the running requests have ended. Raises ConfigError."""
    options = ServeOptions(
        host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile
    )
    listen.check_tls(options)
    with listen.bind(options) as listener:
        options = listen.bound_options(listener, options)
        if options.uds is None:
            check_hosts(config.upstreams, listener.getsockname())
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(_serve_gateway(config, options, admin_key, shutdown_timeout, listener))
        finally:
            cancel_exit_deadline()


def create_proxy(config: GatewayConfig, admin_key: str | None) -> Proxy:
    """The proxy of a configuration, without a server. Raises ConfigError. Call it in the event loop."""
    fleet = Fleet(config.upstreams, POLICIES[config.policy](), time.monotonic)
    watch: FleetWatch | None = None
    if config.discover is not None and config.discover.dns is not None:
        watch = DnsWatch(fleet, config.discover.dns)
    elif config.discover is not None and config.discover.ray is not None:
        watch = RayWatch(fleet, config.discover.ray, config.timeouts)
    elif config.discover is not None and config.discover.file is not None:
        watch = FileWatch(fleet, config.discover.file)
        watch.apply()
        if not fleet.replicas:
            log.warning("%s has no upstreams yet", config.discover.file)
    client_keys = _read_client_keys(config, admin_key)
    keys = Keys(client_keys, admin_key)
    accounts = create_accounts(config, client_keys)
    metrics = GatewayMetrics(fleet)
    access_log = AccessLog(config.access_log, metrics.count_lost_row) if config.access_log is not None else None
    bodies = BodyPool(config.max_body_bytes, config.max_held_bytes)
    return Proxy(
        fleet,
        keys,
        config.timeouts,
        metrics,
        access_log,
        watch,
        bodies=bodies,
        accounts=accounts,
        objective=config.objective,
    )


def create_accounts(config: GatewayConfig, keys: Sequence[ClientKey]) -> Accounts:
    """The accounts of a configuration. Raises ConfigError for an unknown price."""
    for upstream in config.upstreams:
        for model in (upstream.aliases or {}).values():
            price_of(upstream, model, 1000, 1000)
    ledger = Ledger(config.ledger) if config.ledger is not None else None
    return Accounts(keys, ledger, config.budget, config.concurrent)


def _read_client_keys(config: GatewayConfig, admin_key: str | None) -> list[ClientKey]:
    """The keys of clients. Raises ConfigError, also for limits that the gateway cannot enforce."""
    if config.keys is None:
        return []
    keys = read_keys(config.keys, {"the administrator (WEFT_ADMIN_KEY)": admin_key})
    if config.ledger is None and any(key.quota is not None for key in keys):
        raise ConfigError(
            "quota of a key needs a file as ledger, which stores the amounts", code="quota-without-ledger"
        )
    weighted = next((key.name for key in keys if key.weight is not None), None)
    if config.concurrent is None and weighted is not None:
        raise ConfigError(
            f"weight of the key {weighted!r} is its share of the gateway's requests at once; give that number, as in "
            "concurrent: 64, or leave weight out",
            code="weight-without-limit",
        )
    return keys


def watches_of(proxy: Proxy, config: GatewayConfig, admin_key: str | None) -> list[Looking]:
    """The files and sources that are checked for changes while the gateway runs."""
    watches: list[Looking] = [UpstreamKeys(proxy.fleet)]
    if proxy.watch is not None:
        watches.append(proxy.watch)
    if config.keys is not None:

        def take(keys: list[ClientKey]) -> None:
            proxy.accounts.change_keys(keys)  # which may refuse them
            proxy.keys.change(keys)

        watches.append(
            WatchedFile(
                config.keys,
                lambda: _read_client_keys(config, admin_key),
                take,
                subject="the keys of clients stay",
                code="keys-unchanged",
            )
        )
    return watches


def check_hosts(upstreams: Sequence[UpstreamConfig], address: tuple[str, int]) -> None:
    """Raise ConfigError for an unknown host name, and for the gateway's own address."""
    host, port = address[:2]
    for upstream in upstreams:
        url = parse_url(upstream.url)
        try:
            resolved = {str(row[4][0]) for row in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)}
        except OSError as error:
            raise ConfigError(
                f"upstream {upstream.url}: the host {url.host} is unknown: {error_reason(error)}",
                code="unknown-host",
            ) from None
        everywhere = ip_address(host).is_unspecified
        # `listen.bind_beside` listens at ::1 too.
        addresses = {host, "::1"} if host == "127.0.0.1" else {host}
        own = any(ip in addresses or (everywhere and ip_address(ip.partition("%")[0]).is_loopback) for ip in resolved)
        if own and url.port == port:
            raise ConfigError(
                f"upstream {upstream.url} is this gateway itself; give another --port or the server's address",
                code="upstream-is-gateway",
            )


def connection_limits(body_bytes: int, files: int) -> ConnectionLimits:
    """The limits of connections that fit in `files` descriptors. Logs a line if these are fewer than usual."""
    usual = ConnectionLimits(keepalive_s=KEEPALIVE_S, held_bytes=4 * body_bytes)
    # Half of the files: each connection of a client needs a connection to an upstream.
    limits = fit_to_files(usual, files // 2)
    if limits.connections < usual.connections:
        needed = 2 * (usual.connections + usual.spare + RESERVED_FILES + open_files())
        log.warning(
            "%d connections of clients are served at once, not %d: the limit of open files is %d; `ulimit -n %d` "
            "before the start, or LimitNOFILE=%d in a systemd unit, is enough for all",
            limits.connections,
            usual.connections,
            files,
            needed,
            needed,
            extra=event_fields("few-files", connections=limits.connections, files=files, needed=needed),
        )
    return limits


async def _serve_gateway(
    config: GatewayConfig,
    options: ServeOptions,
    admin_key: str | None,
    shutdown_timeout: float,
    listener: socket.socket,
) -> None:
    proxy = create_proxy(config, admin_key)
    limits = connection_limits(config.max_body_bytes, raise_file_limit())
    server = GatewayServer(proxy, listener, limits, options, shutdown_timeout)
    checks = CheckLoop(
        proxy.fleet, config.timeouts, watches_of(proxy, config, admin_key), also=server.reload_certificate
    )
    checking = asyncio.create_task(checks.check_forever())
    listen.start_listening(listener, options)
    gc.set_threshold(GARBAGE_OBJECTS)
    gc.freeze()  # objects that exist now stay, so the collector need not scan them
    upstreams = counted(len(proxy.fleet.replicas), "upstream")
    log.info("%s, %s, at %s", upstreams, config.policy, listen.public_url(listener, options))
    try:
        with handle_stop_signals(server.on_signal, shutdown_timeout), look_at_hangup(checks):
            await server.serve(sockets=[listener])
    finally:
        checking.cancel()
        proxy.close()


@contextmanager
def look_at_hangup(checks: CheckLoop) -> Iterator[None]:
    """Check all files at once on SIGHUP, as other servers do; by default the signal would end the process.

    If it is ignored, as under nohup, it stays so.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    # Not `loop.add_signal_handler`: it takes the descriptor by which the stop guard learns of signals.
    before = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(checks.look_now))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class GatewayServer(HttpServer):
    """The server of a proxy. The first signal lets running requests end, the second cuts them off."""

    def __init__(
        self,
        proxy: Proxy,
        listener: socket.socket,
        limits: ConnectionLimits,
        options: ServeOptions,
        shutdown_timeout: float,
        application: ASGIApp | None = None,
        drain_upstreams: Callable[[], None] = lambda: None,
    ) -> None:
        """`application` replaces the gateway's own application, and uses the same proxy.

        `drain_upstreams` is called with the first signal.
        """
        super().__init__(
            application or create_app(proxy),
            listener,
            limits,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
        )
        self._proxy, self._shutdown_timeout = proxy, shutdown_timeout
        self._drain_upstreams = drain_upstreams
        self._ending: asyncio.Task[None] | None = None
        certfile = options.ssl_certfile
        self._certificate = CertificateFiles(certfile, options.ssl_keyfile) if certfile is not None else None

    def reload_certificate(self) -> None:
        """Use a certificate that has been replaced for new connections. A faulty certificate is logged once."""
        if self._certificate is None or self.config.ssl is None:
            return
        self._certificate.renew(self.config.ssl)

    def on_signal(self, number: signal.Signals, at_s: float) -> None:
        """Begin to shut down, or speed it up."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(number))
        else:
            self.leave()

    async def _end(self, number: signal.Signals) -> None:
        proxy = self._proxy
        proxy.draining = True
        self._drain_upstreams()
        log.info("%s: stopping; %s", number.name, still_running(len(proxy.running)))
        try:
            async with asyncio.timeout(self._shutdown_timeout):
                await proxy.idle.wait()
        except TimeoutError:
            log.warning("requests cut off: %d", len(proxy.running))
        self.leave()
