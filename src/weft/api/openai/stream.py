"""OpenAIStream: the part of a response that both completion endpoints share."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from weft.api.observe.prefix_debug import PrefixReport
from weft.api.service.openai_types import SamplingRequest, StreamOptions, Usage
from weft.api.service.service import Service
from weft.engine.frontend.collector import Delta
from weft.engine.templates.limits import LIMITS
from weft.http.errors import JsonResponse
from weft.http.sse import DONE, Closable, encode_event, send_reply

ChunkChoice = TypeVar("ChunkChoice")


class AnswerSource(Closable, Protocol):
    """The engine's stream, or answers that are read from it."""

    async def finish(self) -> None:
        """Wait until every choice has ended."""


class OpenAIStream(ABC, Generic[ChunkChoice]):
    """The engine's stream as an OpenAI response: one JSON object, or server-sent events of one choice each.

    Every response has its own id, which begins with `id_prefix`.
    """

    def __init__(
        self, service: Service, stream: AnswerSource, model: str, body: SamplingRequest, id_prefix: str
    ) -> None:
        self._frontend = service.frontend
        self._source = stream
        self._model = model
        self._id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._streaming = bool(body.stream)
        self._options = body.stream_options or StreamOptions()
        self._keepalive_s = service.options.keepalive_interval

    async def reply(self, request: Request, report: PrefixReport | None) -> Response:
        """Return the response that `request` asked for. The engine's stream is closed when the response ends."""
        return await send_reply(
            request,
            self._source,
            streaming=self._streaming,
            events=self._events,
            whole=self._whole_response,
            keepalive_s=self._keepalive_s,
            report=report,
        )

    @abstractmethod
    def _whole(self) -> Any:
        """The response's JSON object; called after the engine's stream has ended."""

    @abstractmethod
    def _outputs(self) -> AsyncIterator[tuple[int, Delta]]:
        """Outputs of the engine as they arrive."""

    def _opening_choices(self) -> Sequence[ChunkChoice]:
        """Choices of the chunks that are sent before the engine's first output."""
        return ()

    @abstractmethod
    def _new_choices(self, number: int, delta: Delta) -> Sequence[ChunkChoice]:
        """Choices of the chunks, one each, that an output of prompt `number` makes."""

    def _text_event(self, number: int, delta: Delta) -> bytes | None:
        """Event of an output that is only text, made in a faster way; None: make it in the general way."""
        return None

    @abstractmethod
    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> Any: ...

    @abstractmethod
    def _usage(self) -> Usage:
        """Token counts up to now."""

    async def _whole_response(self) -> Response:
        await self._source.finish()
        if self._usage().total_tokens > LIMITS.loop_positions:
            return await asyncio.to_thread(lambda: JsonResponse(self._whole()))
        return JsonResponse(self._whole())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        usage_in_chunks = self._options.include_usage and self._options.continuous_usage_stats

        def encode(choice: ChunkChoice) -> bytes:
            return encode_event(self._chunk([choice], self._usage() if usage_in_chunks else None))

        for choice in self._opening_choices():
            yield encode(choice)
        async for number, delta in self._outputs():
            event = None if usage_in_chunks else self._text_event(number, delta)
            if event is not None:
                yield event
                continue
            for choice in self._new_choices(number, delta):
                yield encode(choice)
        if self._options.include_usage:
            yield encode_event(self._chunk([], self._usage()))
        yield DONE
