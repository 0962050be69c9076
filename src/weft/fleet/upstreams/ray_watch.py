"""RayWatch: the Ray Serve proxies of a cluster, in front of applications of `weft.ray.serve`, as upstreams.

They are read from the cluster's dashboard, by Ray Serve's REST API: GET /api/serve/applications/.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from weft.fleet.upstreams.checks import get_small
from weft.fleet.upstreams.config import Timeouts, UpstreamConfig
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.replica import Attempt, UpstreamReplica
from weft.fleet.upstreams.upstream import UpstreamError
from weft.fleet.upstreams.watches import PollWatch, bracketed

PATH = "/api/serve/applications/"
DEPLOYMENT = "weft"  # of weft.ray.serve's applications
EVERY = ("", "0.0.0.0", "::")  # hosts of a proxy that listens at every address of its node
ABSENT = ("NOT_STARTED", "DELETING")  # states in which an application does not respond; in all others it may
AWAY_S = 60.0  # how long a dashboard may be without Ray Serve's controller, while the proxies go on
TOKEN = "RAY_AUTH_TOKEN"  # variable with the token that Ray's own clients send to a cluster with RAY_AUTH_MODE=token


class RayProxy(msgspec.Struct):
    """Ray Serve's proxy on a node."""

    node_ip: str | None = None
    status: str | None = None


class HttpOptions(msgspec.Struct):
    """Address at which the proxies listen."""

    host: str = ""
    port: int = 8000


class Application(msgspec.Struct):
    """An application, and its deployments by name."""

    status: str = ""
    route_prefix: str | None = None
    deployments: dict[str, Any] = {}


class ServeState(msgspec.Struct):
    """The parts of the dashboard's answer that are read; none in a cluster without Ray Serve."""

    http_options: HttpOptions | None = None
    proxies: dict[str, RayProxy] = {}
    applications: dict[str, Application] = {}


class RayWatch(PollWatch):
    """Keeps the fleet equal to the Ray Serve proxies of the cluster whose dashboard is at `url`."""

    def __init__(self, fleet: Fleet, url: str, timeouts: Timeouts) -> None:
        """Raises ConfigError for an invalid URL."""
        super().__init__(fleet)
        key = TOKEN if os.environ.get(TOKEN, "").strip() else None
        self._dashboard = UpstreamReplica(UpstreamConfig(url=url, key_env=key))
        self._timeouts = timeouts
        self._seen_at: float | None = None  # when a proxy was last seen, by the fleet's clock

    def close(self) -> None:
        """Close the connection to the dashboard."""
        self._dashboard.close()

    async def _ask(self) -> list[UpstreamConfig]:
        attempt = Attempt(self._dashboard, counted=False)
        try:
            status, body = await get_small(attempt, PATH, self._timeouts)
        finally:
            attempt.close()
        if status != 200:
            raise UpstreamError(f"{self._dashboard.name}{PATH} answers with status {status}", code="ray-refused")
        try:
            state = msgspec.json.decode(body, type=ServeState)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UpstreamError(f"{self._dashboard.name} is not a Ray dashboard: {error}", code="not-ray") from None
        now, upstreams = self._fleet.clock(), serve_upstreams(state)
        if upstreams:
            self._seen_at = now
        elif state.http_options is None and self._seen_at is not None and now < self._seen_at + AWAY_S:
            raise UpstreamError(f"{self._dashboard.name} does not report Ray Serve now", code="ray-serve-away")
        return upstreams


def serve_upstreams(state: ServeState) -> list[UpstreamConfig]:
    """An upstream for each healthy proxy and each application of Weft, in order of their addresses."""
    options = state.http_options
    if options is None:
        return []
    hosts = {
        proxy.node_ip if options.host in EVERY else options.host
        for proxy in state.proxies.values()
        if proxy.status == "HEALTHY" and proxy.node_ip
    }
    paths = {
        application.route_prefix.rstrip("/")
        for application in state.applications.values()
        if DEPLOYMENT in application.deployments and application.route_prefix and application.status not in ABSENT
    }
    return [
        UpstreamConfig(url=f"http://{bracketed(host)}:{options.port}{path}")
        for host in sorted(hosts)
        for path in sorted(paths)
    ]
