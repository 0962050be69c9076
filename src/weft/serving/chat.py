"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from weft.client.collector import Collector
from weft.client.outputs import Logprob
from weft.errors import RequestError
from weft.serving.continuation import answered_ids, check_continuation_key
from weft.serving.logprobs import chat_logprobs
from weft.serving.openai_stream import OpenAIStream
from weft.serving.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Usage,
)
from weft.serving.sampling import sampling_fields
from weft.serving.service import EngineStream, Service


@dataclass(frozen=True)
class PreparedChat:
    """A checked and tokenized chat request, ready for the engine."""

    body: ChatRequest
    model: str
    collectors: list[Collector]


async def chat(request: Request) -> Response:
    """Answer a chat request."""
    service: Service = request.app.state.service
    prepared = await service.prepare(request, prepare_chat)
    check_continuation_key(request, prepared.body)
    stream = service.open_stream(prepared.collectors)
    return await ChatStream(service, stream, prepared.model, prepared.body).reply(request)


def prepare_chat(service: Service, content: bytes) -> PreparedChat:
    """Check a body, render its messages and tokenize them. Raises RequestError and HttpError."""
    body = service.decode_body(content, ChatRequest)
    model = service.resolve_model(body.model)
    fields = sampling_fields(body)
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "top_logprobs needs logprobs to be true", param="top_logprobs", code="top-logprobs-without-logprobs"
        )
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    sampling_params = service.frontend.sampling_params(fields, max_tokens=None)
    service.check_capacity(1, sampling_params)
    prompt = service.frontend.chat_prompt(body.messages, **service.template_arguments(body))
    prompt = replace(prompt, cache_salt=body.cache_salt, answered=answered_ids(body, service.frontend.vocab))
    return PreparedChat(body, model, service.create_collectors([prompt], sampling_params, priority=body.priority))


class ChatStream(OpenAIStream[ChatChunkChoice]):
    """Response to one chat request, built from the engine's stream: one JSON object, or events."""

    def __init__(self, service: Service, stream: EngineStream, model: str, body: ChatRequest) -> None:
        super().__init__(service, stream, model, body, "chatcmpl")
        self._role = service.options.response_role
        self._sends_ids = bool(body.return_token_ids)
        self._sends_prompt_ids = self._sends_ids and body.continue_token_ids is None
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def _whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=output.index,
                message=ChatMessage(role=self._role, content=output.text),
                logprobs=self._logprobs(output.logprobs),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if self._sends_ids else UNSET,
            )
            for output in self._stream.collectors[0].output.outputs
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(),
            prompt_token_ids=self._take_prompt_ids(),
        )

    async def _chunk_choices(self) -> AsyncGenerator[ChatChunkChoice, None]:
        # The role is known before the first token; sending it early shows the client that it is being served.
        collector = self._stream.collectors[0]
        for output in collector.output.outputs if not collector.requests[0].answered else ():
            yield ChatChunkChoice(index=output.index, delta=ChatDelta(role=self._role, content=""))
        async for _, delta in self._stream:
            if delta.text or delta.finish_reason or self._top_logprobs is not None or self._sends_ids:
                yield ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(content=delta.text),
                    logprobs=self._logprobs(delta.logprobs),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    token_ids=delta.token_ids if self._sends_ids else UNSET,
                )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._take_prompt_ids(),
        )

    def _take_prompt_ids(self) -> list[int] | UnsetType:
        """The prompt's token ids, once, if they are asked for."""
        if not self._sends_prompt_ids:
            return UNSET
        self._sends_prompt_ids = False
        return self._stream.collectors[0].output.prompt_token_ids

    def _logprobs(self, positions: Sequence[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        if self._top_logprobs is None:
            return None
        return chat_logprobs(positions or [], self._top_logprobs, self._frontend.token_bytes)
