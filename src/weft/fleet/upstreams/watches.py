"""Watches: sources of upstreams and keys that may change while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from weakref import WeakKeyDictionary, ref

from weft.errors import ConfigError, error_reason
from weft.fleet.upstreams.checks import CHECK_S
from weft.fleet.upstreams.config import UpstreamConfig, parse_url, read_upstreams, upstream_key
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.fleet.upstreams.upstream import UpstreamError
from weft.fleet.upstreams.watched_file import WatchedFile
from weft.logs import event_fields

log = logging.getLogger("weft.gateway")


class FleetWatch:
    """Adds and removes replicas so that the fleet matches a list of upstreams. Other replicas stay."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._replicas: dict[str, UpstreamReplica] = {}

    async def look(self) -> None:
        """Query the source, and follow it. A failure is logged once, and changes nothing."""
        raise NotImplementedError

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
        """Close the watch's own connections."""


class FileWatch(FleetWatch):
    """Follows a file of upstreams."""

    def __init__(self, fleet: Fleet, path: str) -> None:
        super().__init__(fleet)
        self._path = path
        self._file = WatchedFile(
            path, self._read_upstreams, self.follow, subject="the upstreams stay", code="upstreams-unchanged"
        )

    async def look(self) -> None:
        """Read the file if it has changed. A faulty file is logged once, and changes nothing."""
        await self._file.look()

    def apply(self) -> None:
        """Follow the file as it is now. Raises ConfigError before anything is changed."""
        self.follow(self._read_upstreams())

    def _read_upstreams(self) -> list[UpstreamConfig]:
        """The upstreams of the file. Raises ConfigError."""
        upstreams = read_upstreams(self._path)
        marked = next((upstream.url for upstream in upstreams if upstream.overflow), None)
        if marked is not None:
            raise ConfigError(
                f"upstream {marked} is marked overflow; only the file of --config may have overflow upstreams",
                code="overflow-in-discovery",
            )
        return upstreams


class UpstreamKeys:
    """Follows the files of the keys that upstreams require."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._files: WeakKeyDictionary[UpstreamReplica, WatchedFile[str | None]] = WeakKeyDictionary()

    async def look(self) -> None:
        """Use the keys of files that have changed for new requests. A faulty file is logged once."""
        for replica in tuple(self._fleet.replicas.values()):
            if replica.config.key_file is not None:
                await self._files.setdefault(replica, self._watch(replica, replica.config.key_file)).look()

    @staticmethod
    def _watch(replica: UpstreamReplica, path: str) -> WatchedFile[str | None]:
        # Without a reference to the replica, which the dictionary's value must not keep alive.
        config, upstream = replica.config, ref(replica)

        def take(key: str | None) -> None:
            known = upstream()
            if known is not None:
                known.key = key

        subject = f"the key of upstream {replica.name} stays"
        return WatchedFile(path, lambda: upstream_key(config, {}), take, subject=subject, code="upstream-key-unchanged")


class PollWatch(FleetWatch):
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
