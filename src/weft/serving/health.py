"""Health, which is three questions (are you there, do you take requests, are you well), and the load."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft.serving.errors import HttpError, JsonResponse
from weft.serving.metrics import CONTENT_TYPE
from weft.serving.service import Service


async def live(request: Request) -> Response:
    """The process answers."""
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """New requests are welcome."""
    service: Service = request.app.state.service
    if service.draining:
        raise HttpError(503, "the server is shutting down", code="shutting_down")
    return await health(request)


async def health(request: Request) -> Response:
    """The engine lives, and steps finish while requests run."""
    service: Service = request.app.state.service
    trouble = service.unhealthy_reason()
    if trouble is not None:
        raise HttpError(503, trouble, code="unhealthy")
    return JsonResponse({"status": "ok"})


async def load(request: Request) -> Response:
    """Requests that are being answered."""
    service: Service = request.app.state.service
    return JsonResponse({"server_load": len(service.streams)})


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.page(), media_type=CONTENT_TYPE)
