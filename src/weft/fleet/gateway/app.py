"""The gateway's own endpoints: health, models, metrics, administration; all other paths are the upstreams'."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.api.observe.metrics import CONTENT_TYPE
from weft.api.ollama.details import timestamp
from weft.api.ollama.types import ModelDetails, ModelList, ModelRow
from weft.api.server.app import DateHeader
from weft.checkpoint.hub.model_names import tagged
from weft.errors import ConfigError
from weft.fleet.gateway.proxy import Proxy
from weft.fleet.upstreams.checks import check_health, read_models
from weft.fleet.upstreams.config import UpstreamConfig, convert_upstream
from weft.fleet.upstreams.fleet import unknown_model
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.http.errors import HANDLERS, HttpError, JsonResponse

ADMIN_BYTES = 2**16  # bytes of a body

Endpoint = Callable[[Proxy, Request], Awaitable[Response]]


async def live(proxy: Proxy, request: Request) -> Response:
    """/health/live: the process responds."""
    return JsonResponse({"status": "ok"})


async def ready(proxy: Proxy, request: Request) -> Response:
    """/health/ready: new requests are accepted."""
    if proxy.draining:
        raise HttpError(503, "the gateway is shutting down", code="shutting-down")
    return await health(proxy, request)


async def health(proxy: Proxy, request: Request) -> Response:
    """/health: a replica gets requests."""
    if not any(replica.breaker.closed and not replica.draining for replica in proxy.fleet.replicas.values()):
        raise HttpError(503, "no upstream is healthy", code="unhealthy")
    return JsonResponse({"status": "ok"})


async def list_models(proxy: Proxy, request: Request) -> Response:
    """/v1/models: the models of all upstreams that the key may use."""
    client = proxy.keys.identify(request.scope)
    rows = [row for row in proxy.fleet.model_rows() if client.may_use(row["id"])]
    return JsonResponse({"object": "list", "data": rows})


async def get_model(proxy: Proxy, request: Request) -> Response:
    """/v1/models/NAME, and the list if NAME is empty."""
    if not request.path_params["name"]:
        return await list_models(proxy, request)
    client, name = proxy.keys.identify(request.scope), request.path_params["name"]
    for row in proxy.fleet.model_rows():
        if row["id"] == name and client.may_use(name):
            return JsonResponse(row)
    raise unknown_model(name)


async def list_tags(proxy: Proxy, request: Request) -> Response:
    """/api/tags: the same in Ollama's form."""
    client = proxy.keys.identify(request.scope)
    details = ModelDetails(format="", family="", families=[], parameter_size="", quantization_level="")
    rows = [row for row in proxy.fleet.model_rows() if client.may_use(row["id"])]
    models = [
        ModelRow(
            name=tagged(row["id"]),
            model=tagged(row["id"]),
            modified_at=timestamp(row.get("created") or 0),
            size=0,
            digest="",
            details=details,
        )
        for row in rows
    ]
    return JsonResponse(ModelList(models))


async def metrics(proxy: Proxy, request: Request) -> Response:
    """/metrics: Prometheus text."""
    proxy.keys.identify(request.scope)
    return Response(proxy.metrics.render(), media_type=CONTENT_TYPE)


async def status(proxy: Proxy, request: Request) -> Response:
    """/gateway/status: the replicas and their state."""
    proxy.keys.check_admin(request.scope)
    now = proxy.fleet.clock()
    rows = [describe_replica(replica, now) for replica in proxy.fleet.replicas.values()]
    content = {
        "running": len(proxy.running),
        "draining": proxy.draining,
        "held_bytes": proxy.bodies.held,
        "upstreams": rows,
        "spending": proxy.accounts.describe(),
    }
    return JsonResponse(content)


def describe_replica(replica: UpstreamReplica, now: float) -> dict[str, Any]:
    """One row of /gateway/status."""
    models = replica.models
    return {
        "url": replica.name,
        "weight": replica.weight,
        "share": round(replica.breaker.share(now), 3),
        "connections": replica.connections,
        "unanswered": len(replica.unanswered),
        "predicted_ttft_s": replica.predicted_ttft_s(0),
        "overflow": replica.overflow,
        "is_weft": replica.is_weft,
        "draining": replica.draining,
        "breaker": replica.breaker.state(now),
        "failures": replica.breaker.failures,
        "last_failure": replica.breaker.last_failure or None,
        "models": None if models is None else sorted(models),
    }


async def drain(proxy: Proxy, request: Request) -> Response:
    """/gateway/drain: send an upstream no new requests; /gateway/add ends the draining."""
    replica = proxy.fleet.find(await read_url(proxy, request))
    replica.draining = True
    return JsonResponse(describe_replica(replica, proxy.fleet.clock()))


async def remove(proxy: Proxy, request: Request) -> Response:
    """/gateway/remove: forget an upstream; its running requests go on."""
    replica = proxy.fleet.find(await read_url(proxy, request))
    proxy.fleet.remove(replica)
    return JsonResponse(describe_replica(replica, proxy.fleet.clock()))


async def add(proxy: Proxy, request: Request) -> Response:
    """/gateway/add: a new upstream, or an upstream that drains."""
    upstream: UpstreamConfig = convert_upstream(await read_admin_body(proxy, request))
    if upstream.overflow:
        raise HttpError(400, "an overflow upstream is added in the gateway's file only", code="overflow-not-allowed")
    if upstream.key_env is not None or upstream.key_file is not None:
        # Otherwise an administrator could have the gateway send its secrets to any upstream.
        raise HttpError(400, "an upstream with a key is added in the gateway's files only", code="key-not-allowed")
    replica = proxy.fleet.add(upstream)
    # An administrator who drains another upstream next relies on this one: by then its models are known, and whether it
    # continues answers.
    await check_health(replica, proxy.fleet, proxy.timeouts, urgent=True)
    await read_models(replica, proxy.timeouts)
    return JsonResponse(describe_replica(replica, proxy.fleet.clock()))


async def read_url(proxy: Proxy, request: Request) -> str:
    """The `url` of an administrator's request. Raises HttpError."""
    url = (await read_admin_body(proxy, request)).get("url")
    if not isinstance(url, str):
        raise HttpError(400, 'the body must name an upstream: {"url": "http://10.0.1.10:8000"}', code="url-missing")
    return url


async def read_admin_body(proxy: Proxy, request: Request) -> dict[str, Any]:
    """The JSON object that an administrator sends. Raises HttpError."""
    proxy.keys.check_admin(request.scope)
    # A browser does not send this content type to another site without asking that site for permission.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HttpError(415, "send JSON, with Content-Type: application/json", code="not-json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > ADMIN_BYTES:
            raise HttpError(413, f"the body is longer than {ADMIN_BYTES} bytes", code="body-too-large")
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise HttpError(400, "the body must be a JSON object", code="body-not-object")
    return values


ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/health", health),
    ("GET", "/health/live", live),
    ("GET", "/health/ready", ready),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("GET", "/api/tags", list_tags),
    ("GET", "/metrics", metrics),
    ("GET", "/gateway/status", status),
    ("POST", "/gateway/drain", drain),
    ("POST", "/gateway/add", add),
    ("POST", "/gateway/remove", remove),
)
OWN = ("/health", "/v1/models", "/api/tags", "/metrics", "/gateway")


def create_app(proxy: Proxy) -> ASGIApp:
    """The application: the gateway's own paths, and the proxy for all others, without routing."""
    own = DateHeader(
        Starlette(
            routes=[Route(path, _bound(proxy, endpoint), methods=[method]) for method, path, endpoint in ENDPOINTS],
            exception_handlers=HANDLERS,
        )
    )

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        is_own = path.startswith(OWN) and any(path == name or path.startswith(f"{name}/") for name in OWN)
        await (own if is_own else proxy)(scope, receive, send)

    return application


def _bound(proxy: Proxy, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint as Starlette calls it. A ConfigError is the fault of the request."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(proxy, request)
        except ConfigError as error:
            raise HttpError(400, str(error), code=error.code) from None

    return call
