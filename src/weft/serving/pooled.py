"""PooledSource: the requests for embeddings and scores behind one HTTP request, in waves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response

from weft.client.collector import Collector
from weft.errors import QueueFullError, RequestError
from weft.serving.errors import JsonResponse
from weft.serving.openai_types import PromptTokensDetails
from weft.serving.pooling_types import PoolingUsage
from weft.serving.service import EngineStream, Service
from weft.serving.sse import while_connected
from weft.text.limits import LIMITS

INPUTS = 2048  # of one HTTP request, as OpenAI's
WAVE = 256  # requests that one HTTP request has in the engine at once
FULL_POLL_S = 0.02
LOOP_NUMBERS = 2**13  # of an answer that is built and encoded in the event loop; a longer one is in a thread


def check_inputs(count: int, param: str) -> None:
    """Raise RequestError for no inputs, or for more than one request may have."""
    if not 1 <= count <= INPUTS:
        raise RequestError(
            f"{param} has {count:,} items; give from 1 to {INPUTS:,}", param=param, code="too-many-items"
        )


def limited(service: Service, collectors: Iterable[Collector], param: str) -> list[Collector]:
    """List collectors as they are made. Raises RequestError for more tokens than one HTTP request may have."""
    most_tokens = max(LIMITS.prompt_tokens, 4 * service.frontend.max_model_len)
    listed, tokens = [], 0
    for collector in collectors:
        tokens += len(collector.output.prompt_ids)
        if tokens > most_tokens:
            raise RequestError(
                f"{param} comes to more than {most_tokens:,} tokens in one request; send several requests",
                param=param,
                code="too-many-prompt-tokens",
            )
        listed.append(collector)
    return listed


def usage_of(collectors: Iterable[Collector]) -> PoolingUsage:
    """Tokens of all prompts: nothing else is counted."""
    outputs = [collector.output for collector in collectors]
    tokens = sum(len(output.prompt_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=PromptTokensDetails(cached))


class PooledSource:
    """The engine's streams for one HTTP request. The first wave begins at once, so that refusals come before any work.

    `aclose` must be called; it aborts what has not ended.
    """

    def __init__(self, service: Service, collectors: list[Collector]) -> None:
        self._service = service
        size = max(1, min(WAVE, service.capacity))  # all at once would keep other clients out of the queue
        self._waves = [collectors[at : at + size] for at in range(0, len(collectors), size)]
        self._stream: EngineStream | None = service.open_stream(self._waves.pop(0)) if self._waves else None

    async def finish(self) -> None:
        """Wait until all have ended."""
        while self._stream is not None:
            await self._stream.finish()
            await self.aclose()
            if self._waves:
                self._stream = await self._open_next()

    async def _open_next(self) -> EngineStream:
        """Begin the next wave, as soon as the queue has room for it: the request has been accepted."""
        wave = self._waves.pop(0)
        while True:
            try:
                return self._service.open_stream(wave)
            except QueueFullError:
                await asyncio.sleep(FULL_POLL_S)

    async def aclose(self) -> None:
        """Abort the requests of the wave that runs."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


async def reply_pooled(
    request: Request, collectors: list[Collector], build: Callable[[], object], numbers: int
) -> Response:
    """Run the requests of `collectors`, and answer with what `build` makes of them then, of about so many `numbers`.

    A client that leaves ends the requests.
    """
    service: Service = request.app.state.service
    source = PooledSource(service, collectors)

    async def whole() -> Response:
        await source.finish()
        if numbers > LOOP_NUMBERS:
            return await asyncio.to_thread(lambda: JsonResponse(build()))
        return JsonResponse(build())

    try:
        response = await while_connected(request.receive, whole())
    finally:
        await source.aclose()
    return response or Response()  # the client is gone: nobody reads this one
