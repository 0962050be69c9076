"""Endpoints for liveness, readiness, health, load, metrics and the figures of `weft top`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft.api.observe.metrics import CONTENT_TYPE
from weft.api.service.service import Service
from weft.http.access import is_owner
from weft.http.errors import HttpError, JsonResponse
from weft.monitor.figures import without_processes


async def live(request: Request) -> Response:
    """/health/live: the process responds."""
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """/health/ready: new requests are accepted."""
    service: Service = request.app.state.service
    if service.draining:
        raise HttpError(503, "the server is shutting down", code="shutting-down")
    return await health(request)


async def health(request: Request) -> Response:
    """/health: the engine is alive, and steps finish while requests run."""
    service: Service = request.app.state.service
    reason = service.unhealthy_reason()
    if reason is not None:
        raise HttpError(503, reason, code="unhealthy")
    return JsonResponse({"status": "ok"})


async def server_load(request: Request) -> Response:
    """/load: number of HTTP requests that are being answered by the engine, and the planner's speed of prompts.

    `prefill_tok_s` is in tokens per second, None on a machine that the planner does not know.
    """
    service: Service = request.app.state.service
    return JsonResponse({"server_load": len(service.streams), "prefill_tok_s": service.prefill_tok_s})


async def metrics(request: Request) -> Response:
    """/metrics: Prometheus text."""
    service: Service = request.app.state.service
    await service.monitor.refresh()
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


async def monitor(request: Request) -> Response:
    """/monitor: the figures of the server, its ranks and GPUs as `weft top` shows them, with the diagnosis.

    Only the owner of the server sees the processes that use memory of its GPUs: they may be other users'.
    """
    service: Service = request.app.state.service
    await service.monitor.refresh()
    figures = service.monitor.figures()
    return JsonResponse(figures if is_owner(request) else without_processes(figures))
