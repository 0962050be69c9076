"""Ollama's endpoints about models: served and cached models, downloads and removals."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft.api.ollama import details
from weft.api.ollama.names import requested_name, resolve_served, served_name
from weft.api.ollama.types import ModelList, ModelRequest, RunningList, ShowAnswer, ShowRequest, VersionAnswer
from weft.api.service.run_files import running_servers
from weft.api.service.service import Service
from weft.checkpoint.hub import local_models
from weft.checkpoint.hub.local_models import LocalModel
from weft.checkpoint.hub.model_names import tagged
from weft.errors import ModelError, RequestError
from weft.http.access import check_owner
from weft.http.errors import HttpError, JsonResponse

# Release of Ollama with this API. Clients require a minimum, such as 0.6.4 (VS Code's Copilot) or 0.14, the first to
# accept Anthropic's requests. Weft's own version is at /version.
API_VERSION = "0.14.0"

ABSENT = {
    "create": "models are not made here; give the files to `weft serve`",
    "copy": "a model has one name here; --served-model-name gives it others",
    "push": "models are not published from here",
    "blobs": "files are not uploaded to this server; `weft pull` fetches models",
}


async def root(request: Request) -> Response:
    """/: the line by which clients recognize a server of this API."""
    return PlainTextResponse("Ollama is running")


async def version(request: Request) -> Response:
    """/api/version: the version of Ollama's API."""
    return JsonResponse(VersionAnswer(API_VERSION))


async def tags(request: Request) -> Response:
    """/api/tags: the served model by each of its names, and the models in the hub's cache."""
    service: Service = request.app.state.service
    rows = [details.served_row(service, name) for name in service.listed_names]
    if not service.options.list_served_only:
        local = await asyncio.to_thread(lambda: [details.local_row(model) for model in local_models.list_models()])
        rows += [row for row in local if served_name(service, row.name) is None]
    return JsonResponse(ModelList(rows))


async def running(request: Request) -> Response:
    """/api/ps: the served model, while it is awake."""
    service: Service = request.app.state.service
    names = () if service.unloading.sleeps else service.listed_names
    return JsonResponse(RunningList([details.running_row(service, name) for name in names]))


async def show(request: Request) -> Response:
    """/api/show: facts of the served model."""
    service: Service = request.app.state.service
    return await service.prepare(request, show_model)


def show_model(service: Service, content: bytes) -> Response:
    """The answer to /api/show."""
    name = resolve_served(service, requested_name(service.decode_body(content, ShowRequest)))
    plan, row = service.plan, details.served_row(service, name)
    defaults = service.frontend.sampling_params({})
    parameters = {"num_ctx": service.frontend.max_model_len, "temperature": defaults.temperature}
    parameters |= {"top_k": defaults.top_k, "top_p": defaults.top_p, "repeat_penalty": defaults.repetition_penalty}
    lines = [f"{key:<30} {value}" for key, value in parameters.items()]
    template = service.frontend.template_source or ""
    return JsonResponse(
        ShowAnswer(
            modelfile=f"# served by Weft\nFROM {tagged(name)}\n",
            parameters="\n".join(lines),
            template=template,
            details=row.details,
            model_info=details.model_info(plan),
            capabilities=_capabilities(service),
            modified_at=row.modified_at,
        )
    )


def _capabilities(service: Service) -> list[str]:
    """Abilities of the served model, in Ollama's words."""
    settings = service.pooler.settings
    does: list[tuple[str, bool]] = [
        ("completion", generates := settings is None or settings.generates),
        ("tools", generates and bool(service.frontend.template_source)),
        ("thinking", generates and service.answer_format.reasoning is not None),
        ("embedding", settings is not None and settings.task == "embed"),
    ]
    return [name for name, has in does if has]


async def delete(request: Request) -> Response:
    """/api/delete: remove a model from the hub's cache."""
    check_owner(request)
    service: Service = request.app.state.service
    name = await service.prepare(request, delete_name)
    if served_name(service, name) is not None:
        raise HttpError(409, f"{name!r:.200} is being served; stop this server first", code="model-in-use")
    await asyncio.to_thread(_remove, service, name)
    return Response()


def delete_name(service: Service, content: bytes) -> str:
    """The model that a body of /api/delete names."""
    return requested_name(service.decode_body(content, ModelRequest))


def _remove(service: Service, name: str) -> None:
    """Remove a model that no server of this machine reads. Raises HttpError 409."""
    model = find_local(name)
    servers = [("this server", service.checkpoints)]
    servers += [(f"the server at {server.url}", server.checkpoints) for server in running_servers()]
    for server, checkpoints in servers:
        if any(local_models.holds_checkpoint(model, checkpoint) for checkpoint in checkpoints):
            raise HttpError(
                409, f"the files of {name!r:.200} are being served; stop {server} first", code="model-in-use"
            )
    local_models.remove_model(model)


def find_local(name: str) -> LocalModel:
    """The model of the hub's cache that a name means. Raises RequestError and HttpError 404."""
    try:
        model = local_models.find_model(name)
    except ModelError as error:
        raise RequestError(str(error), param="model", code=error.code) from None
    if model is None:
        raise HttpError(404, f"model {name!r:.200} not found", code="model-not-found", param="model")
    return model


async def absent(request: Request) -> Response:
    """Endpoints of Ollama's that a server of one model does not have."""
    name = request.url.path.split("/api/")[-1].partition("/")[0]
    raise HttpError(501, f"/api/{name} is not supported: {ABSENT[name]}", code="not-supported")
