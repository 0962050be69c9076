"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from weft.client.collector import Delta as News
from weft.client.outputs import Logprob
from weft.errors import RequestError
from weft.serving.logprobs import chat_logprobs
from weft.serving.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Delta,
    Message,
    StreamOptions,
)
from weft.serving.sampling import said
from weft.serving.service import Answer, Service
from weft.serving.sse import DONE, event, reply


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    wire = await service.read(request, ChatRequest)
    model = service.named(wire.model)
    params = said(wire)
    if wire.max_completion_tokens is not None:
        params["max_tokens"] = wire.max_completion_tokens
    if wire.top_logprobs is not None and not wire.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if wire.logprobs:
        params["logprobs"] = wire.top_logprobs or 0
    sampling = service.frontend.params(params, max_tokens=None)
    prompt = await service.prompt(service.render(wire.messages, wire), special=False, param="messages")
    answer = service.answer([prompt], sampling, priority=wire.priority)
    talk = Talk(service, answer, model, wire)
    return await reply(
        request,
        answer,
        stream=bool(wire.stream),
        events=talk.events,
        whole=talk.whole,
        keepalive_s=service.options.keepalive_interval,
    )


class Talk:
    """One chat completion on its way out."""

    def __init__(self, service: Service, answer: Answer, model: str, wire: ChatRequest) -> None:
        self._answer = answer
        self._role = service.options.response_role
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._options = wire.stream_options or StreamOptions()
        self._top = (wire.top_logprobs or 0) if wire.logprobs else None
        self._service = service

    async def whole(self) -> ChatCompletion:
        await self._answer.finish()
        choices = [
            ChatChoice(
                index=made.index,
                message=Message(role=self._role, content=made.text),
                logprobs=None if self._top is None else self._logprobs(made.logprobs or []),
                finish_reason=made.finish_reason,
                stop_reason=made.stop_reason,
            )
            for made in self._answer.jobs[0].output.outputs
        ]
        return ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=self._answer.usage
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        # Who speaks is known before the first token: the client sees that it is being served.
        for made in self._answer.jobs[0].output.outputs:
            yield self._event([ChatChunkChoice(index=made.index, delta=Delta(role=self._role, content=""))])
        async for _, news in self._answer:
            if news.text or news.finish_reason or self._top is not None:
                yield self._event([self._choice(news)])
        if self._options.include_usage:
            yield self._event([])
        yield DONE

    def _choice(self, news: News) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=news.index,
            delta=Delta(content=news.text),
            logprobs=None if self._top is None else self._logprobs(news.logprobs or []),
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
        )

    def _event(self, choices: list[ChatChunkChoice]) -> bytes:
        """One chunk; the one without choices is the last, with the usage."""
        counted = not choices or (self._options.include_usage and self._options.continuous_usage_stats)
        usage = self._answer.usage if counted else None
        return event(ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage))

    def _logprobs(self, positions: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        return chat_logprobs(positions, self._top or 0, self._service.frontend.token_bytes)
