"""PooledSource: the requests for embeddings and scores behind one HTTP request, in waves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.api.service.engine_stream import EngineStream, timeout_error
from weft.api.service.openai_types import PromptTokensDetails
from weft.api.service.pooling_types import PoolingUsage
from weft.api.service.service import Service
from weft.engine.frontend.collector import Collector
from weft.engine.templates.limits import LIMITS
from weft.errors import QueueFullError, RequestError
from weft.http.errors import JsonResponse, shutting_down_error
from weft.http.key_rates import counting
from weft.http.leaving import while_connected

INPUTS = 2048  # inputs of one HTTP request, as OpenAI's
WAVE = 256  # requests that one HTTP request has in the engine at once
FULL_POLL_S = 0.02
NUMBER_BYTES = 24  # bytes of an answer, for each of its numbers: as text, twice while it is encoded
PIECE_BYTES = 2**18  # bytes of an answer that are sent at once
LOOP_NUMBERS = 2**13  # most numbers of an answer that is built in the event loop and not in a thread


def check_inputs(count: int, param: str) -> None:
    """Raise RequestError for no inputs, or for more than one request may have."""
    if not 1 <= count <= INPUTS:
        raise RequestError(
            f"{param} has {count:,} items; give from 1 to {INPUTS:,}", param=param, code="too-many-items"
        )


def limited(service: Service, collectors: Iterable[Collector], param: str) -> list[Collector]:
    """List collectors as they are created. Raises RequestError for more tokens than one HTTP request may have."""
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

    It is one of the service's open streams until `aclose`, which must be called, and which aborts unfinished requests.
    """

    def __init__(self, service: Service, collectors: list[Collector]) -> None:
        self._service, self.collectors = service, collectors
        size = max(1, min(WAVE, service.capacity))  # all at once would keep other clients out of the queue
        self._waves = [collectors[at : at + size] for at in range(0, len(collectors), size)]
        self._cut = self._timed_out = False
        service.check_open()
        self._stream: EngineStream | None = None
        if self._waves:
            with counting.get().accepting(sum(len(collector.output.prompt_ids) for collector in collectors)):
                self._stream = self._open(self._waves.pop(0))
        timeout_s = service.options.request_timeout  # of all waves, and of the wait between them
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out) if timeout_s else None
        service.stream_opened(self)

    def _open(self, wave: list[Collector]) -> EngineStream:
        return EngineStream(self._service, wave, counted=False)

    async def finish(self) -> None:
        """Wait until all have ended."""
        while self._stream is not None:
            await self._stream.finish()
            await self._close_wave()
            if self._waves:
                self._stream = await self._open_next()

    async def _open_next(self) -> EngineStream:
        """Begin the next wave as soon as it fits in the queue.

        The request has been accepted, so that it also ends normally during a shutdown.
        """
        wave = self._waves.pop(0)
        while not (self._cut or self._timed_out):
            try:
                return self._open(wave)
            except QueueFullError:
                await asyncio.sleep(FULL_POLL_S)
        raise timeout_error(self._service) if self._timed_out else shutting_down_error()

    def cut_off(self) -> None:
        """Abort all requests; `finish` then raises a 503 error."""
        self._cut = True
        if self._stream is not None:
            self._stream.cut_off()

    def _time_out(self) -> None:
        """Abort all requests; `finish` then raises a 504 error."""
        self._timed_out = True
        if self._stream is not None:
            self._stream.time_out()

    async def _close_wave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()

    async def aclose(self) -> None:
        """Abort the requests of the wave that runs."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._close_wave()
        finally:
            self._service.stream_closed(self)


class PooledAnswer(JsonResponse):
    """An answer that is sent in pieces, as the client reads, and then returns its bytes to the budget."""

    given_back: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            body = memoryview(self.body)
            for at in range(0, len(body), PIECE_BYTES):
                piece = bytes(body[at : at + PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": at + PIECE_BYTES < len(body)})
        finally:
            self.given_back()


async def reply_pooled(
    request: Request, collectors: list[Collector], build: Callable[[], object], numbers: int
) -> Response:
    """Run the requests of `collectors`, and answer with the result of `build`, which has about `numbers` numbers.

    A disconnect of the client ends the requests. Raises HttpError if the answers under way use all allowed bytes.
    """
    service: Service = request.app.state.service
    size = numbers * NUMBER_BYTES
    service.answer_bytes.take(size)
    answer: PooledAnswer | None = None
    try:
        answer = await _answer_of(request, PooledSource(service, collectors), build, numbers)
    finally:
        if answer is None:
            service.answer_bytes.give_back(size)
    if answer is None:
        return Response()  # the client has disconnected
    answer.given_back = partial(service.answer_bytes.give_back, size)
    return answer


async def _answer_of(
    request: Request, source: PooledSource, build: Callable[[], object], numbers: int
) -> PooledAnswer | None:
    """The answer once all have ended; None if the client has left before."""

    async def whole() -> PooledAnswer:
        await source.finish()
        if numbers > LOOP_NUMBERS:
            return await asyncio.to_thread(lambda: PooledAnswer(build()))
        return PooledAnswer(build())

    try:
        return await while_connected(request, whole())
    finally:
        await source.aclose()
