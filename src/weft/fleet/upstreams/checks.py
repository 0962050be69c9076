"""Checks of replicas: their health, their models, their speed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from weft.fleet.upstreams.config import Timeouts
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.replica import Attempt, UpstreamReplica
from weft.fleet.upstreams.upstream import UpstreamError

log = logging.getLogger("weft.gateway")

CHECK_S = 5.0  # seconds for the response to a check
SMALL_BYTES = 2**22  # largest response that is read as a whole, such as the response of /v1/models
MODEL_ROWS = 10_000


class UpstreamModels(msgspec.Struct):
    data: list[dict[str, Any]]


class PredictedLoad(msgspec.Struct):
    prefill_tok_s: float | None = None


async def check_health(replica: UpstreamReplica, fleet: Fleet, timeouts: Timeouts, *, urgent: bool = False) -> None:
    """GET /health: every response below 500 is fine, since not every server has that path.

    An unhealthy replica is checked after a pause, or at once if the check is `urgent`. A success closes an open
    breaker; on a closed breaker it has no effect. If a check opens the breaker, requests that wait for the replica move
    to others.
    """
    breaker = replica.breaker
    if not breaker.admits(fleet.clock(), urgent=urgent):
        return
    attempt = Attempt(replica, counted=False, probes=True)
    try:
        status, _ = await get_small(attempt, "/health", timeouts)
        fault = f"status {status} of /health" if status >= 500 else ""
    except UpstreamError as error:
        fault = str(error)
    if fault:
        attempt.fail(fleet.clock(), fault)
    else:
        replica.proved = True
        if not breaker.closed:
            attempt.succeed(fleet.clock())
    attempt.close()
    if fault and not breaker.closed:
        replica.give_up_movable(
            UpstreamError(f"it is not healthy: {fault}", code="upstream-unhealthy", public="it is not healthy")
        )


async def read_models(replica: UpstreamReplica, timeouts: Timeouts) -> bool:
    """GET /v1/models. Without a list, requests for any model may go to the replica.

    Return False if this request, or the request for the speed after it, has failed. The next check then repeats both.
    """
    attempt = Attempt(replica, counted=False)
    try:
        status, body = await get_small(attempt, "/v1/models", timeouts)
        if status == 200:
            rows = msgspec.json.decode(body, type=UpstreamModels).data[:MODEL_ROWS]
            replica.listed = {row["id"]: row for row in rows if isinstance(row.get("id"), str)}
            if replica.is_weft:
                await _read_speed(replica, timeouts)
    except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.debug("no models of %s: %s", replica.name, error)
        if isinstance(error, UpstreamError):
            return False
    finally:
        attempt.close()
    replica.asked = True
    return True


async def _read_speed(replica: UpstreamReplica, timeouts: Timeouts) -> None:
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
