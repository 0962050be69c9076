"""EngineStream: the engine's outputs for one HTTP request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from weft.api.observe.monitoring import ServerMonitor
from weft.api.observe.tracing import trace_headers
from weft.api.service.engine import ServingEngine
from weft.api.service.openai_types import PromptTokensDetails, Usage
from weft.engine.core.request import Output
from weft.engine.executors.ranks import CLOSED
from weft.engine.frontend.collector import Collector, Delta
from weft.engine.templates.limits import LIMITS
from weft.errors import EngineError, NoEngineError
from weft.http.clients import current
from weft.http.errors import HttpError, shutting_down_error
from weft.http.key_rates import counting
from weft.http.options import ServeOptions

if TYPE_CHECKING:
    from weft.api.observe.spans import RequestSpans

log = logging.getLogger("weft.serving")


RESTART_S = 5  # seconds after which clients should retry while engines restart


class StreamOwner(Protocol):
    """The part of a service that its streams use."""

    engine: ServingEngine
    options: ServeOptions
    monitor: ServerMonitor
    spans: RequestSpans | None

    def stream_opened(self, stream: EngineStream) -> None:
        """Count a stream; called by the stream itself."""
        ...

    def stream_closed(self, stream: EngineStream) -> None:
        """Forget a stream; called by the stream itself."""
        ...

    def observe(self, collector: Collector, delta: Delta, last_s: float | None, now_s: float, replica: int) -> None:
        """Update the metrics of a replica with a delta. `last_s` is the time of its choice's previous delta, if any."""
        ...


class EngineStream:
    """The engine's outputs for one HTTP request: (prompt number, Delta) as they arrive, until every choice has ended.

    `aclose` must be called; it aborts unfinished choices. Without `counted` it is a part of another open stream, to
    which the limits of its key and --request-timeout apply.
    """

    def __init__(self, service: StreamOwner, collectors: Sequence[Collector], *, counted: bool = True) -> None:
        self.collectors, self._counted = collectors, counted
        self._service = service
        self._owners: dict[str, tuple[int, Collector]] = {}  # by engine request
        self._client, self._count, self._charged = current.get(), counting.get(), False
        self._timed_out = False
        for number, collector in enumerate(collectors):
            self._owners |= dict.fromkeys((request.id for request in collector.requests), (number, collector))
        with self._count.accepting(self.usage.prompt_tokens) if counted else nullcontext():
            self._outputs = self._submit()
        timeout_s = service.options.request_timeout if counted else None
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.time_out) if timeout_s else None
        if counted:
            service.stream_opened(self)

    def _submit(self) -> AsyncGenerator[Output, None]:
        service = self._service
        signed = [[self._client.sign(request) for request in collector.requests] for collector in self.collectors]
        outputs = service.engine.submit([request for requests in signed for request in requests])
        # After submit: a refused request may be retried, and must not be signed, counted or logged twice.
        for collector, requests in zip(self.collectors, signed, strict=True):
            collector.requests = requests
            service.monitor.prefixes.add(requests[0])
            if service.options.enable_log_requests:
                log.info("request %s: prompt %r, %r", requests[0].id, collector.output.prompt, requests[0].params)
        return outputs

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        running = len(self._owners)
        last_s: dict[str, float] = {}
        try:
            async for output in self._outputs:
                now = time.monotonic()
                number, collector = self._owners[output.id]
                if output.prompt_logprobs and len(output.prompt_logprobs) > LIMITS.loop_positions:
                    delta = await asyncio.to_thread(collector.add, output, now)
                else:
                    delta = collector.add(output, now)
                if delta is None:
                    continue
                collector.raise_failure()
                self._service.observe(collector, delta, last_s.get(output.id), now, output.replica)
                last_s[output.id] = now
                if delta.cut:
                    self._service.engine.abort([output.id])
                yield number, delta
                running -= delta.finish_reason is not None
                if not running:
                    return
        except EngineError as error:
            raise self._client_error(error) from error
        raise timeout_error(self._service) if self._timed_out else shutting_down_error()

    def _client_error(self, error: EngineError) -> Exception:
        """The error of a request whose engine has ended; HttpError 503 if engines restart."""
        engine = self._service.engine
        if engine.failure is not None or error.cause == CLOSED:
            return error
        reason = engine.outage or f"the engine has started again: {error}"
        # A gateway counts "engine-restarts": the engine died with the request.
        code = "engine-starts" if isinstance(error, NoEngineError) else "engine-restarts"
        return HttpError(503, f"{reason}; try again later", code=code, retry_after_s=RESTART_S)

    def cut_off(self) -> None:
        """Abort all requests; iterating then raises a 503 error."""
        self._service.engine.abort(list(self._owners))

    def time_out(self) -> None:
        """Abort all requests; iterating then raises a 504 error."""
        self._timed_out = True
        self._service.engine.abort(list(self._owners))

    async def finish(self) -> None:
        """Wait until every choice has ended."""
        async for _ in self:
            pass

    async def aclose(self) -> None:
        """Abort unfinished choices and leave the service's list of open streams."""
        try:
            await self._outputs.aclose()
        finally:  # also if the engine raises: with an open stream it would look stalled
            if self._timer is not None:
                self._timer.cancel()
            if not self._charged:
                self._charged = True
                self._count.count_answer(self.usage.completion_tokens)
                if self._service.spans is not None:
                    self._service.spans.record(self.collectors, trace_headers.get())
            if self._counted:
                self._service.stream_closed(self)

    @property
    def usage(self) -> Usage:
        """Token counts up to now, over all prompts and choices."""
        prompt = completion = cached = 0
        for collector in self.collectors:
            prompt += len(collector.output.prompt_ids)
            cached += collector.output.num_cached_tokens
            for choice in collector.output.outputs:
                completion += len(choice.token_ids)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def timeout_error(service: StreamOwner) -> HttpError:
    """The 504 error for requests that take longer than --request-timeout."""
    return HttpError(
        504,
        f"the request took longer than {service.options.request_timeout:g} s, the most that it may; ask for fewer "
        "tokens (max_tokens), or raise --request-timeout",
        code="request-timeout",
    )
