"""Endpoints under the admin key: sleep and wake-up, the prefix cache, traces and their report, the layout."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api.service.service import Service
from weft.engine.client.control import memory_rows, profile_command, trace_paths
from weft.engine.core.commands import RankStats, ResetPrefixCache, Sleep, Wake
from weft.errors import RequestError
from weft.http.access import check_owner
from weft.http.errors import HttpError, JsonResponse

MAX_TRACED_STEPS = 1000  # steps of a trace, which then has hundreds of megabytes

Endpoint = Callable[[Service, Request], Awaitable[Response]]


async def sleep(service: Service, request: Request) -> Response:
    """/sleep?level=1: free the GPU memory of the KV cache and the weights; level 2 drops the weights."""
    await service.engine.call(Sleep(integer_query(request, "level", 1)))
    return Response()


async def wake_up(service: Service, request: Request) -> Response:
    """/wake_up: undo /sleep."""
    service.unloading.unloaded = False
    await service.engine.call(Wake())
    service.note_awake()
    return Response()


async def is_sleeping(service: Service, request: Request) -> Response:
    """/is_sleeping."""
    return JsonResponse({"is_sleeping": bool(service.engine.stats.sleep_level)})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """/reset_prefix_cache: let no later request reuse KV."""
    await service.engine.call(ResetPrefixCache())
    return Response()


async def start_profile(service: Service, request: Request) -> Response:
    """/start_profile?steps=N: trace the next steps, at most MAX_TRACED_STEPS, or until /stop_profile."""
    steps = integer_query(request, "steps", MAX_TRACED_STEPS)
    if steps > MAX_TRACED_STEPS:
        raise RequestError(
            f"steps is {steps}; it must be at most {MAX_TRACED_STEPS:,}: longer traces no browser opens",
            param="steps",
            code="profile-steps",
        )
    replies = await service.engine.call(profile_command(steps, service.options.profile_directory))
    files = trace_paths(replies)
    if steps:
        service.last_profile.begin(files)
    return JsonResponse({"files": files})


async def stop_profile(service: Service, request: Request) -> Response:
    """/stop_profile: write the traces."""
    replies = await service.engine.call(profile_command(0, service.options.profile_directory))
    return JsonResponse({"files": trace_paths(replies)})


async def profile(service: Service, request: Request) -> Response:
    """/profile: the last profile's files, and its report once all are complete; ?partial=1: of the complete files."""
    monitor = service.monitor
    await monitor.refresh()
    forecast = monitor.forecasts[0] if len(monitor.forecasts) == 1 else None
    describe = functools.partial(service.last_profile.describe, partial=bool(integer_query(request, "partial", 0)))
    return JsonResponse(await asyncio.to_thread(describe, monitor.history, forecast))


async def profile_trace(service: Service, request: Request) -> Response:
    """/profile_trace: the last profile's complete traces as one, for chrome://tracing and Perfetto."""
    if not service.last_profile.written:
        raise HttpError(404, "no trace is complete; POST /start_profile begins one", code="no-trace")
    return Response(await asyncio.to_thread(service.last_profile.merged), media_type="application/gzip")


async def layout(service: Service, request: Request) -> Response:
    """/layout: one row per rank."""
    return JsonResponse(memory_rows(await service.engine.call_each(RankStats(reset=False))))


def integer_query(request: Request, name: str, default: int) -> int:
    """A query parameter of the URL. Raises RequestError unless it is an integer."""
    text = request.query_params.get(name, str(default))
    if not text.isdecimal():
        raise RequestError(f"{name} is {text!r:.60}; it must be a whole number", param=name, code="no-whole-number")
    return int(text)


def for_owner(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Let only requests with the admin key reach an endpoint; without such a key, only local requests."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        check_owner(request)
        return await endpoint(request.app.state.service, request)

    return checked


ADMIN_ROUTES = tuple(
    Route(f"/{endpoint.__name__}", for_owner(endpoint), methods=[method])
    for method, endpoint in (
        ("POST", sleep),
        ("POST", wake_up),
        ("GET", is_sleeping),
        ("POST", reset_prefix_cache),
        ("POST", start_profile),
        ("POST", stop_profile),
        ("GET", profile),
        ("GET", profile_trace),
        ("GET", layout),
    )
)
