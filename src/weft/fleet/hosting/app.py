"""The front's own endpoints: health, lists of models, administration; all other paths are the models' servers'."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weft._version import __version__
from weft.api.observe.metrics import CONTENT_TYPE
from weft.api.ollama.models import API_VERSION
from weft.api.ollama.names import requested_name
from weft.api.ollama.types import ModelList, ModelRequest, RunningList, VersionAnswer
from weft.api.server.app import DateHeader, RequestIds
from weft.checkpoint.hub.model_names import LATEST
from weft.errors import ConfigError, RequestError, WeftError
from weft.fleet.accounts.keys import ANONYMOUS, GatewayClient
from weft.fleet.gateway.app import describe_replica, read_admin_body
from weft.fleet.hosting.front import SetProxy
from weft.fleet.upstreams.fleet import unknown_model
from weft.http.access import comes_from_here
from weft.http.body import convert_object, parse_object
from weft.http.errors import HANDLERS, HttpError, JsonResponse
from weft.logs import request_id

Endpoint = Callable[[SetProxy, Request], Awaitable[Response]]

MODEL_COMMANDS = {"reset_prefix_cache": "POST", "layout": "GET", "is_sleeping": "GET"}  # sent on to one model


async def root(front: SetProxy, request: Request) -> Response:
    """/: the line by which clients recognize a server of Ollama's API."""
    return PlainTextResponse("Ollama is running")


async def version(front: SetProxy, request: Request) -> Response:
    """/version: the server's own version."""
    return JsonResponse(VersionAnswer(__version__))


async def api_version(front: SetProxy, request: Request) -> Response:
    """/api/version: the version of Ollama's API."""
    return JsonResponse(VersionAnswer(API_VERSION))


async def live(front: SetProxy, request: Request) -> Response:
    """/health/live: the process responds."""
    return JsonResponse({"status": "ok"})


async def ready(front: SetProxy, request: Request) -> Response:
    """/health/ready: the models that are loaded with the set have been loaded, and new requests are accepted."""
    if front.draining:
        raise HttpError(503, "the server is shutting down", code="shutting-down")
    if not front.keeper.started:
        raise HttpError(503, "the models are being loaded", code="model-not-ready")
    for name, hosted in front.keeper.models.items():
        if hosted.wanted:
            state = front.keeper.residency.tenants[name].state
            raise HttpError(503, f"{name!r} is {state.value}", code="model-not-ready")
        if hosted.plan.entry.must_be_awake and (fault := front.keeper.fault_of(name)):
            raise HttpError(503, fault, code="model-not-ready")
    return JsonResponse({"status": "ok"})


async def health(front: SetProxy, request: Request) -> Response:
    """/health: all models that must be awake are, no engine of an awake model has a fault, and no model is down."""
    for name in front.keeper.models:
        if fault := front.keeper.fault_of(name):
            raise HttpError(503, fault, code="model-down")
    return JsonResponse({"status": "ok"})


def identify_reader(front: SetProxy, request: Request) -> GatewayClient:
    """The sender of a request for a list, who needs no key on this machine with --open-listing. Raises HttpError."""
    try:
        return front.keys.identify(request.scope)
    except HttpError:
        if front.options.open_listing and comes_from_here(request.scope):
            return ANONYMOUS
        raise


async def list_models(front: SetProxy, request: Request) -> Response:
    """/v1/models: every name of every model that the key may use."""
    client = identify_reader(front, request)
    rows = [front.catalogue.model_row(name, entry) for name, entry in front.catalogue.listed() if client.may_use(name)]
    return JsonResponse({"object": "list", "data": rows})


async def get_model(front: SetProxy, request: Request) -> Response:
    """/v1/models/NAME, and the list if NAME is empty."""
    if not request.path_params["name"]:
        return await list_models(front, request)
    client, name = identify_reader(front, request), request.path_params["name"]
    entry = front.catalogue.find(name)
    if entry is None or not client.may_use(name):
        raise unknown_model(name)
    return JsonResponse(front.catalogue.model_row(name, entry))


def _may_use(client: GatewayClient, name: str) -> bool:
    """Return True if a key may use a model, whose name has a tag here."""
    return client.may_use(name) or client.may_use(name.removesuffix(LATEST))


async def list_tags(front: SetProxy, request: Request) -> Response:
    """/api/tags: all models in Ollama's form."""
    client = identify_reader(front, request)
    rows = await asyncio.to_thread(front.catalogue.tag_rows)
    return JsonResponse(ModelList([row for row in rows if _may_use(client, row.name)]))


async def list_running(front: SetProxy, request: Request) -> Response:
    """/api/ps: the models that are awake."""
    client = identify_reader(front, request)
    rows = await asyncio.to_thread(front.catalogue.running_rows)
    return JsonResponse(RunningList([row for row in rows if _may_use(client, row.name)]))


async def show(front: SetProxy, request: Request) -> Response:
    """/api/show: facts of a model, which need not be awake."""
    client = front.keys.identify(request.scope)
    try:
        name = requested_name(convert_object(parse_object(await front.receive_small(request)), ModelRequest))
    except RequestError as error:
        raise HttpError(400, str(error), code=error.code, param=error.param) from None
    if not _may_use(client, front.catalogue.own_name(name)):
        raise unknown_model(name)
    return JsonResponse(await asyncio.to_thread(front.catalogue.show, name))


async def metrics(front: SetProxy, request: Request) -> Response:
    """/metrics: Prometheus text of the front; each model's own process has more."""
    front.keys.identify(request.scope)
    return Response(front.metrics.render(), media_type=CONTENT_TYPE)


async def absent(front: SetProxy, request: Request) -> Response:
    """Ollama's endpoints that change the models on the disk."""
    raise HttpError(
        501, f"{request.url.path} is not supported here; use `weft pull` and `weft rm`", code="not-supported"
    )


# Administration


async def admin_models(front: SetProxy, request: Request) -> Response:
    """GET /admin/models: the state, the plan and the failures of every model."""
    front.keys.check_admin(request.scope)
    front.catalogue.relist()
    rooms = {
        device: {"bytes": room, "held_bytes": front.keeper.residency.held(device)}
        for device, room in front.keeper.residency.rooms.items()
    }
    rows = [front.catalogue.admin_row(entry) for entry in front.catalogue.models.entries]
    return JsonResponse({"rooms": rooms, "models": rows})


async def change_model(front: SetProxy, request: Request) -> Response:
    """POST /admin/models/{load,wake,sleep,unload}: {"model": NAME}; the answer is the model's row, once it is done."""
    name = (await read_admin_body(front, request)).get("model")
    if not isinstance(name, str) or not name:
        raise HttpError(400, 'the body must name a model: {"model": "small"}', code="model-missing", param="model")
    return await _change(front, name, request.path_params["change"])


async def _change(front: SetProxy, name: str, change: str) -> Response:
    hosted = await front.catalogue.planned(name)
    own = hosted.plan.entry.name
    if change in ("load", "wake"):
        await front.keeper.wake(own)
    elif change in ("sleep", "unload"):
        await front.keeper.sleep_or_unload(own, unload=change == "unload")
    else:
        raise HttpError(404, f"there is no change {change!r:.60}; load, wake, sleep or unload", code="unknown-url")
    return JsonResponse(front.catalogue.admin_row(hosted.plan.entry))


async def sleep(front: SetProxy, request: Request) -> Response:
    """/sleep?model=NAME."""
    front.keys.check_admin(request.scope)
    level = request.query_params.get("level", "1")
    if level != "1":
        raise HttpError(
            400,
            f"level is {level!r:.60}; models of a set sleep at level 1; POST /admin/models/unload drops the weights",
            code="sleep-level",
            param="level",
        )
    return await _change(front, _named(front, request), "sleep")


async def wake_up(front: SetProxy, request: Request) -> Response:
    """/wake_up?model=NAME."""
    front.keys.check_admin(request.scope)
    return await _change(front, _named(front, request), "wake")


async def one_model(front: SetProxy, request: Request) -> Response:
    """The paths of MODEL_COMMANDS with ?model=NAME: the answer of that model's own server. It is not woken for them."""
    front.keys.check_admin(request.scope)
    path = request.url.path.removeprefix("/")
    hosted = await front.catalogue.planned(_named(front, request))
    name, member = hosted.plan.entry.name, hosted.member
    if not member.is_running:
        if path == "is_sleeping":
            return JsonResponse({"is_sleeping": True})
        raise HttpError(409, f"{name!r} is not loaded; POST /admin/models/load", code="model-not-loaded")
    status, body = await member.request_as_admin(MODEL_COMMANDS[path], f"/{quote(path)}")
    return Response(body, status, media_type="application/json")


def _named(front: SetProxy, request: Request) -> str:
    return request.query_params.get("model") or front.catalogue.only_name()


async def status(front: SetProxy, request: Request) -> Response:
    """/gateway/status: the processes in the form of the gateway's status, for `weft top`."""
    front.keys.check_admin(request.scope)
    now = front.fleet.clock()
    rows = [describe_replica(replica, now) for replica in front.fleet.replicas.values()]
    return JsonResponse(
        {
            "running": len(front.running),
            "draining": front.draining,
            "held_bytes": front.bodies.held,
            "upstreams": rows,
            "spending": front.accounts.describe(),
        }
    )


ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/", root),
    ("GET", "/version", version),
    ("GET", "/health", health),
    ("GET", "/health/live", live),
    ("GET", "/health/ready", ready),
    ("GET", "/ping", health),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", get_model),
    ("GET", "/metrics", metrics),
    ("GET", "/gateway/status", status),
    ("GET", "/api/version", api_version),
    ("GET", "/api/tags", list_tags),
    ("GET", "/api/ps", list_running),
    ("POST", "/api/show", show),
    ("POST", "/api/pull", absent),
    ("DELETE", "/api/delete", absent),
    *(("POST", f"/api/{name}", absent) for name in ("create", "copy", "push")),
    ("GET", "/admin/models", admin_models),
    ("POST", "/admin/models/{change}", change_model),
    ("POST", "/sleep", sleep),
    ("POST", "/wake_up", wake_up),
    *((method, f"/{name}", one_model) for name, method in MODEL_COMMANDS.items()),
)
ID_HEADER = b"x-request-id"
OWN = frozenset(path for _, path, _ in ENDPOINTS)
PREFIXES = ("/v1/models/", "/admin/models/")


def create_app(front: SetProxy) -> ASGIApp:
    """The application: own paths, and the proxy for the others."""
    routes = [Route(path, _bound(front, endpoint), methods=[method]) for method, path, endpoint in ENDPOINTS]
    own = DateHeader(Starlette(routes=routes, exception_handlers=HANDLERS))

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        await (own if path in OWN or path.startswith(PREFIXES) else front)(scope, receive, send)

    options = front.options
    if not options.enable_request_id_headers and options.log_format != "json":
        return application
    return RequestIds(_sending_ids_on(application), logs=options.log_format == "json")


def _sending_ids_on(application: ASGIApp) -> ASGIApp:
    """The application, with the id of each request in the request that a model's server gets."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        others = [pair for pair in scope["headers"] if pair[0] != ID_HEADER]
        await application(
            {**scope, "headers": [*others, (ID_HEADER, request_id.get().encode("latin-1"))]}, receive, send
        )

    return named


def _bound(front: SetProxy, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint as Starlette calls it."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(front, request)
        except ConfigError as error:
            raise HttpError(400, str(error), code=error.code) from None
        except HttpError:
            raise
        except WeftError as error:
            raise HttpError(503, str(error), code=error.code) from None

    return call
