"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from weft.client.collector import Collector
from weft.client.outputs import Logprob
from weft.errors import RequestError
from weft.serving.logprobs import chat_logprobs
from weft.serving.openai_answer import OpenAIAnswer
from weft.serving.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Delta,
    Message,
    Usage,
)
from weft.serving.sampling import said
from weft.serving.service import Answer, Service


@dataclass(frozen=True)
class AskedChat:
    """A chat request that is ready for the engine."""

    wire: ChatRequest
    model: str
    jobs: list[Collector]


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await service.prepared(request, prepare_chat)
    answer = service.answer(asked.jobs)
    return await Talk(service, answer, asked.model, asked.wire).reply(request)


def prepare_chat(service: Service, content: bytes) -> AskedChat:
    """Check a body, render its messages and tokenise them. Raises RequestError and HttpError."""
    wire = service.wire(content, ChatRequest)
    model = service.named(wire.model)
    params = said(wire)
    if wire.max_completion_tokens is not None:
        params["max_tokens"] = wire.max_completion_tokens
    if wire.top_logprobs is not None and not wire.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if wire.logprobs:
        params["logprobs"] = wire.top_logprobs or 0
    sampling = service.frontend.sampling_params(params, max_tokens=None)
    service.check_places(1, sampling)
    text = service.render(wire.messages, wire)
    prompt = service.frontend.parse_prompt(text, special=False, param="messages")
    return AskedChat(wire, model, service.jobs([prompt], sampling, priority=wire.priority))


class Talk(OpenAIAnswer[ChatChunkChoice]):
    """One chat completion on its way out."""

    def __init__(self, service: Service, answer: Answer, model: str, wire: ChatRequest) -> None:
        super().__init__(service, answer, model, wire, "chatcmpl")
        self._role = service.options.response_role
        self._top = (wire.top_logprobs or 0) if wire.logprobs else None

    def _whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=made.index,
                message=Message(role=self._role, content=made.text),
                logprobs=self._logprobs(made.logprobs),
                finish_reason=made.finish_reason,
                stop_reason=made.stop_reason,
            )
            for made in self._answer.jobs[0].output.outputs
        ]
        return ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=self._usage()
        )

    async def _pieces(self) -> AsyncGenerator[ChatChunkChoice, None]:
        # Who speaks is known before the first token: the client sees that it is being served.
        for made in self._answer.jobs[0].output.outputs:
            yield ChatChunkChoice(index=made.index, delta=Delta(role=self._role, content=""))
        async for _, news in self._answer:
            if news.text or news.finish_reason or self._top is not None:
                yield ChatChunkChoice(
                    index=news.index,
                    delta=Delta(content=news.text),
                    logprobs=self._logprobs(news.logprobs),
                    finish_reason=news.finish_reason,
                    stop_reason=news.stop_reason,
                )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _logprobs(self, positions: Sequence[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        return None if self._top is None else chat_logprobs(positions or [], self._top, self._frontend.token_bytes)
