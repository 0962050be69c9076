"""Requests of every API, in every kind, and the verdict on how each has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

import httpx

from scripts.programs.soak.processes import MODEL

PATIENCE_S = 90.0  # a request that has not ended by then is lost
# Ends of a request. A retryable error has status 503 or 429 and Retry-After, or is the error event of a stream.
ANSWERED, REFUSED, GONE, RETRYABLE, LOST, DOUBLED, WRONG = (
    "answered",
    "refused",
    "gone",
    "retryable",
    "lost",
    "doubled",
    "wrong",
)


class Verdict(NamedTuple):
    """`outcome` is one of the constants above, `code` that of the error, `why` says more of one that must not be."""

    outcome: str
    code: str = ""
    why: str = ""


class Kind(NamedTuple):
    """One kind of request: `status` is the one that it gets if the server runs.

    `leaves`: the client goes away after that many pieces of the answer; 0: before the first.
    """

    name: str
    path: str
    body: Any
    status: int = 200
    leaves: int | None = None


def words_of(random: Random) -> str:
    return " ".join(random.choice(("sea", "sky", "rain", "snow", "fire")) for _ in range(random.randint(1, 60)))


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def draw_kind(random: Random) -> Kind:
    """Draw a request: four of five are well formed, and of these one of eight has a client that goes away."""
    text, tokens, stream = words_of(random), random.randint(1, 24), random.random() < 0.6
    if random.random() < 0.2:
        return random.choice(_bad_kinds(text))
    leaves = random.randint(0, 4) if random.random() < 0.125 else None
    ollama = {"stream": stream, "options": {"num_predict": tokens, "temperature": random.random()}}
    common: dict[str, Any] = {"stream": stream, "temperature": random.random(), "max_tokens": tokens}
    made: Mapping[str, tuple[str, dict[str, Any]]] = {
        "completion": ("/v1/completions", {"model": MODEL, "prompt": text, "n": random.randint(1, 2), **common}),
        "chat": ("/v1/chat/completions", chat(text, **common)),
        "responses": ("/v1/responses", {"model": MODEL, "input": text, "stream": stream, "max_output_tokens": tokens}),
        "messages": ("/v1/messages", chat(text, **common)),
        "ollama chat": ("/api/chat", chat(text, **ollama)),
        "ollama generate": ("/api/generate", {"model": MODEL, "prompt": text, **ollama}),
    }
    name = random.choice(list(made))
    path, body = made[name]
    return Kind(f"{name}{' stream' if stream else ''}", path, body, leaves=leaves)


def _bad_kinds(text: str) -> list[Kind]:
    path = "/v1/chat/completions"
    return [
        Kind("cut JSON", path, json.dumps(chat(text))[:-5].encode(), 400),
        Kind("no JSON", "/v1/completions", b"\xff\x00 no JSON", 400),
        Kind("wrong type", path, chat(text, max_tokens="many"), 400),
        Kind("no messages", "/v1/messages", {"model": MODEL, "max_tokens": 4}, 400),
        Kind("unknown model", path, {**chat(text), "model": "other"}, 404),
        Kind("too long", "/v1/completions", {"model": MODEL, "prompt": [5] * 100_000}, 400),
        Kind("embeddings", "/v1/embeddings", {"model": MODEL, "input": text}, 400),
        Kind("wrong type of Ollama", "/api/chat", {"model": MODEL, "messages": 5}, 400),
        Kind("unknown URL", "/v1/nothing", chat(text), 404),
    ]


async def ask(client: httpx.AsyncClient, kind: Kind) -> Verdict:
    """Send a request. Returns how it has ended."""
    received, pieces = b"", 0
    content = kind.body if isinstance(kind.body, bytes) else json.dumps(kind.body).encode()
    request = client.build_request("POST", kind.path, content=content, headers={"Content-Type": "application/json"})
    try:
        async with asyncio.timeout(PATIENCE_S):
            if kind.leaves == 0:
                return await _leave_early(client, request)
            answer = await client.send(request, stream=True)
            try:
                async for piece in answer.aiter_raw():
                    received += piece
                    pieces += 1
                    if pieces == kind.leaves:
                        return Verdict(GONE)
            finally:
                await answer.aclose()
    except TimeoutError:
        return Verdict(LOST, why=f"{kind.name}: no end after {PATIENCE_S:g} s: {received[-200:]!r}")
    except httpx.RemoteProtocolError as error:
        # A stream that has told its error ends without the mark of a whole body.
        verdict = judge_stream(kind, received)
        return (
            verdict if verdict.outcome == RETRYABLE else Verdict(LOST, why=f"{kind.name}: {error}: {received[-200:]!r}")
        )
    except httpx.HTTPError as error:
        return Verdict(LOST, why=f"{kind.name}: {type(error).__name__}: {error}: {received[-200:]!r}")
    return judge(kind, answer.status_code, answer.headers, received)


async def _leave_early(client: httpx.AsyncClient, request: httpx.Request) -> Verdict:
    """Go away before the answer begins."""
    sending = asyncio.create_task(client.send(request))
    await asyncio.sleep(0.02)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return Verdict(GONE)


def judge(kind: Kind, status: int, headers: Mapping[str, str], received: bytes) -> Verdict:
    """The verdict on a whole response."""
    if status in (429, 503):
        retryable = "retry-after" in headers and _error_of(received)
        return Verdict(RETRYABLE if retryable else WRONG, str(status), f"{kind.name}: {received[:300]!r}")
    if status != kind.status:
        return Verdict(WRONG, str(status), f"{kind.name}: status {status}: {received[:300]!r}")
    if status != 200:
        return Verdict(REFUSED if _error_of(received) else WRONG, str(status), f"{kind.name}: {received[:300]!r}")
    if "text/event-stream" in headers["content-type"] or "ndjson" in headers["content-type"]:
        return judge_stream(kind, received)
    return Verdict(ANSWERED) if json.loads(received) else Verdict(WRONG, why=f"{kind.name}: empty")


def judge_stream(kind: Kind, received: bytes) -> Verdict:
    """The verdict on a stream: it has exactly one end, which is that of an answer or an error."""
    ends = errors = 0
    for line in received.splitlines():
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            ends += 1
        elif data.startswith(b"{"):
            event = json.loads(data)
            ended, failed = _mark_of(event)
            ends += ended
            errors += failed
    if ends + errors == 1:
        return Verdict(ANSWERED) if ends else Verdict(RETRYABLE, "stream")
    outcome = DOUBLED if ends + errors else LOST
    return Verdict(outcome, why=f"{kind.name}: {ends} ends and {errors} errors: {received[-300:]!r}")


def _mark_of(event: dict[str, Any]) -> tuple[bool, bool]:
    """Return if an event ends an answer, and if it ends one with an error. OpenAI's [DONE] is no event."""
    name = event.get("type", "")
    ended = name in ("response.completed", "response.incomplete", "message_stop") or event.get("done") is True
    # A response that fails has two events: its own state, and the error.
    failed = name == "error" or (not name and bool(event.get("error")))
    return ended, failed


def _error_of(received: bytes) -> bool:
    try:
        return bool(json.loads(received)["error"])
    except (ValueError, KeyError, TypeError):
        return False
