"""Background tasks of the gateway: health checks, model lists, upstream discovery."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from weft.errors import ConfigError, error_reason
from weft.gateway.config import Timeouts, UpstreamConfig, parse_url, read_upstreams
from weft.gateway.fleet import Fleet
from weft.gateway.replica import Attempt, Replica
from weft.gateway.upstream import UpstreamError
from weft.logs import event_fields

log = logging.getLogger("weft.gateway")

CHECK_EVERY_S = 2.0
CHECK_S = 5.0  # seconds for the response to a check
MODELS_EVERY_S = 30.0  # seconds between two looks at the models of a replica; at once after it has recovered
SMALL_BYTES = 2**22  # bytes of a response that is read whole, such as that of /v1/models
MODEL_ROWS = 10_000


class ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class PredictedLoad(msgspec.Struct):
    prefill_tok_s: float | None = None


async def check_forever(
    fleet: Fleet, timeouts: Timeouts, watch: FileWatch | PollWatch | None, also: Callable[[], None] = lambda: None
) -> None:
    """Check the replicas and what is watched every CHECK_EVERY_S seconds, and call `also`, until it is cancelled."""
    due: dict[Replica, float] = {}
    logged = ""
    while True:
        try:
            also()
            await _check_all(fleet, timeouts, watch, due)
        except Exception as error:  # a fault of ours: without checks no replica would recover
            if repr(error) != logged:
                logged = repr(error)
                log.exception("a check failed; checks go on", extra=event_fields("check-failed"))
        await asyncio.sleep(CHECK_EVERY_S)


async def _check_all(
    fleet: Fleet, timeouts: Timeouts, watch: FileWatch | PollWatch | None, due: dict[Replica, float]
) -> None:
    """Check every replica and poll the watch once. When all have finished, raise the first unexpected exception."""
    if isinstance(watch, FileWatch):
        watch.look()
    replicas = tuple(fleet.replicas.values())
    looking = [watch.look()] if isinstance(watch, PollWatch) else []  # beside the checks: it may take long
    checking = [_check(replica, fleet, timeouts, due) for replica in replicas]
    results = await asyncio.gather(*looking, *checking, return_exceptions=True)
    for replica in [replica for replica in due if replica not in replicas]:
        del due[replica]
    for error in results:
        if isinstance(error, Exception):
            raise error


async def _check(replica: Replica, fleet: Fleet, timeouts: Timeouts, due: dict[Replica, float]) -> None:
    was_closed = replica.breaker.closed
    await check_health(replica, fleet, timeouts)
    now = time.monotonic()
    due_now = now >= due.get(replica, 0.0) or not was_closed
    if replica.breaker.closed and due_now and await read_models(replica, timeouts):
        due[replica] = now + MODELS_EVERY_S


async def check_health(replica: Replica, fleet: Fleet, timeouts: Timeouts) -> None:
    """GET /health: every response below 500 is fine, since not every server has that path.

    A success closes the breaker, but says nothing of requests while it is closed. If the checks open it, requests
    that wait for the replica go to others.
    """
    breaker = replica.breaker
    if not breaker.admits(fleet.clock()):
        return
    attempt = Attempt(replica, counted=False, probes=True)
    try:
        status, _ = await get_small(attempt, "/health", timeouts)
        fault = f"status {status} of /health" if status >= 500 else ""
    except UpstreamError as error:
        fault = str(error)
    if fault:
        attempt.fail(fleet.clock(), fault)
    elif not breaker.closed:
        attempt.succeed(fleet.clock())
    attempt.close()
    if fault and not breaker.closed:
        replica.give_up_movable(
            UpstreamError(f"it is not healthy: {fault}", code="upstream-unhealthy", public="it is not healthy")
        )


async def read_models(replica: Replica, timeouts: Timeouts) -> bool:
    """GET /v1/models. Without a list, requests for any model may go to the replica.

    Return False if this request, or the one for the speed after it, has failed. The next check then
    sends both again.
    """
    attempt = Attempt(replica, counted=False)
    try:
        status, body = await get_small(attempt, "/v1/models", timeouts)
        if status == 200:
            rows = msgspec.json.decode(body, type=ModelList).data[:MODEL_ROWS]
            replica.listed = {row["id"]: row for row in rows if isinstance(row.get("id"), str)}
            if replica.is_weft:
                await _read_speed(replica, timeouts)
    except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.debug("no models of %s: %s", replica.name, error)
        return not isinstance(error, UpstreamError)
    finally:
        attempt.close()
    return True


async def _read_speed(replica: Replica, timeouts: Timeouts) -> None:
    """GET /load of a Weft replica: the planner's speed of prompts. Raises UpstreamError and DecodeError."""
    attempt = Attempt(replica, counted=False)
    try:
        status, body = await get_small(attempt, "/load", timeouts)
        speed = msgspec.json.decode(body, type=PredictedLoad).prefill_tok_s if status == 200 else None
        if speed is not None and speed > 0:
            replica.prefill_tok_s = speed
    finally:
        attempt.close()


async def get_small(attempt: Attempt, path: str, timeouts: Timeouts) -> tuple[int, bytes]:
    """Status and body of a small response to a check. Raises UpstreamError."""
    return await ask_small(attempt, "GET", path, key=attempt.replica.key, limit_s=CHECK_S, timeouts=timeouts)


async def ask_small(
    attempt: Attempt, method: str, path: str, *, key: str | None, limit_s: float, timeouts: Timeouts
) -> tuple[int, bytes]:
    """Status and body of a small response to a request without a body. Raises UpstreamError."""
    url = attempt.replica.url
    lines = [f"{method} {url.path}{path} HTTP/1.1", f"host: {url.authority}"]
    if key:
        lines.append(f"authorization: Bearer {key}")
    if method != "GET":
        lines.append("content-length: 0")
    head = "\r\n".join([*lines, "", ""]).encode()
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            response = await attempt.request(method.encode(), head, b"", connect_s=timeouts.connect, first_byte_s=0)
            while piece := await attempt.read_piece():
                body += piece
                if len(body) > SMALL_BYTES:
                    raise UpstreamError(f"{path} has more than {SMALL_BYTES} bytes", code="response-too-large")
    except TimeoutError:
        raise UpstreamError(f"no response to {path} within {limit_s:g} s", code="check-timeout") from None
    return response.status, bytes(body)


class Watch:
    """Adds and removes replicas so that the fleet matches a list of upstreams. Other replicas stay."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._replicas: dict[str, Replica] = {}

    def follow(self, wanted: Iterable[UpstreamConfig]) -> None:
        """Add and remove replicas so that they match the list of valid upstreams."""
        upstreams = {str(parse_url(upstream.url)): upstream for upstream in wanted}
        for name, replica in tuple(self._replicas.items()):
            if upstreams.get(name) != replica.config:
                self._fleet.remove(replica)
                del self._replicas[name]
                log.info("upstream %s is removed", name)
        for name, upstream in upstreams.items():
            if name not in self._replicas and name not in self._fleet.replicas:
                self._replicas[name] = self._fleet.add(upstream)
                log.info("upstream %s is added", name)

    def close(self) -> None:
        """Close its own connections, if it has any."""


class FileWatch(Watch):
    """Follows a file of upstreams."""

    def __init__(self, fleet: Fleet, path: str) -> None:
        super().__init__(fleet)
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    def look(self) -> None:
        """Read the file if it has changed. A faulty one is logged once, and changes nothing."""
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            stamp = (0, 0, 0)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.apply()
        except ConfigError as error:
            log.error("the upstreams stay as they are: %s", error, extra=event_fields("upstreams-unchanged"))

    def apply(self) -> None:
        """Follow the file as it is now. Raises ConfigError before anything is changed."""
        upstreams = read_upstreams(self._path)
        marked = next((upstream.url for upstream in upstreams if upstream.overflow), None)
        if marked is not None:
            raise ConfigError(
                f"upstream {marked} is marked overflow; only the file of --config may have such ones",
                code="overflow-in-discovery",
            )
        self.follow(upstreams)


class PollWatch(Watch):
    """Follows a source of upstreams in the network, which is queried at every check."""

    _failed = False

    async def look(self) -> None:
        """Query the source. A failure is logged once, and changes nothing."""
        try:
            upstreams = await self._ask()
        except UpstreamError as error:
            if not self._failed:
                log.error("the upstreams stay as they are: %s", error, extra=event_fields("upstreams-unchanged"))
            self._failed = True
            return
        self._failed = False
        self.follow(upstreams)

    async def _ask(self) -> list[UpstreamConfig]:
        """The current upstreams. Raises UpstreamError."""
        raise NotImplementedError


class DnsWatch(PollWatch):
    """Follows the addresses of a host: each is an upstream, with the port and path of `url`."""

    def __init__(self, fleet: Fleet, url: str) -> None:
        super().__init__(fleet)
        self._url = parse_url(url)
        if self._url.scheme != "http":
            raise ConfigError(
                f"discover.dns is {url}; it must be an http:// URL, since a certificate names no address",
                code="dns-not-http",
            )

    async def _ask(self) -> list[UpstreamConfig]:
        url, loop = self._url, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CHECK_S):
                rows = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"no addresses of {url.host}: {error_reason(error)}", code="no-addresses") from None
        addresses = sorted({str(row[4][0]) for row in rows})
        return [UpstreamConfig(url=f"http://{bracketed(address)}:{url.port}{url.path}") for address in addresses]


def bracketed(address: str) -> str:
    """An IP address as URLs have it."""
    return f"[{address}]" if ":" in address else address
