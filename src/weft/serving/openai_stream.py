"""OpenAIAnswer: what both completion endpoints do alike with an answer on its way out."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from weft.serving.errors import JsonResponse
from weft.serving.openai_types import Sampling, StreamOptions, Usage
from weft.serving.service import EngineStream, Service
from weft.serving.sse import DONE, event, reply
from weft.text.limits import LIMITS

Choice = TypeVar("Choice")  # of a chunk


class OpenAIStream(ABC, Generic[Choice]):
    """One answer under an id of its own, which begins with `kind`: whole, or in chunks of one choice each."""

    def __init__(self, service: Service, answer: EngineStream, model: str, wire: Sampling, kind: str) -> None:
        self._frontend = service.frontend
        self._answer = answer
        self._model = model
        self._id = f"{kind}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._stream = bool(wire.stream)
        self._options = wire.stream_options or StreamOptions()
        self._keepalive_s = service.options.keepalive_interval

    async def reply(self, request: Request) -> Response:
        return await reply(
            request,
            self._answer,
            stream=self._stream,
            events=self._events,
            whole=self._finished,
            keepalive_s=self._keepalive_s,
        )

    @abstractmethod
    def _whole(self) -> Any:
        """All of it, once it has come."""

    @abstractmethod
    def _pieces(self) -> AsyncGenerator[Choice, None]:
        """What there is to tell of the choices, as it comes."""

    @abstractmethod
    def _chunk(self, choices: list[Choice], usage: Usage | None) -> Any: ...

    def _usage(self) -> Usage:
        """So far."""
        return self._answer.usage

    async def _finished(self) -> Response:
        await self._answer.finish()
        if self._answer.usage.total_tokens > LIMITS.loop_positions:
            return await asyncio.to_thread(lambda: JsonResponse(self._whole()))
        return JsonResponse(self._whole())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        running = self._options.include_usage and self._options.continuous_usage_stats
        async with aclosing(self._pieces()) as pieces:
            async for choice in pieces:
                yield event(self._chunk([choice], self._usage() if running else None))
        if self._options.include_usage:
            yield event(self._chunk([], self._usage()))
        yield DONE
