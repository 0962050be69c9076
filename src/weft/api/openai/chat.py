"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from weft.api.conversation.chat_answer import (
    AnswerChoice,
    AnswerDelta,
    ChatAnswers,
    ToolCall,
    ToolCallDelta,
    open_answers,
)
from weft.api.conversation.chat_prompt import PreparedChat, prepare_chat
from weft.api.openai.stream import OpenAIStream
from weft.api.service.continuation import check_continuation_key
from weft.api.service.logprobs import chat_logprobs
from weft.api.service.openai_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatToolCall,
    ChatToolCallDelta,
    CustomCall,
    FunctionCall,
    Usage,
)
from weft.api.service.service import Service
from weft.engine.frontend.collector import Delta
from weft.engine.frontend.outputs import Logprob
from weft.http.sse import encode_event

MARK = "\ue000text\ue001"  # stands for the text in an event that is encoded once


async def chat(request: Request) -> Response:
    """Answer a chat request."""
    service: Service = request.app.state.service
    prepared = await service.prepare_in_steps(request, decode_chat)
    check_continuation_key(request, prepared.body)
    report = prepared.report(service, request)
    return await ChatStream(service, open_answers(service, prepared)).reply(request, report)


async def decode_chat(service: Service, content: bytes) -> PreparedChat:
    """Decode a body and prepare it. Raises RequestError and HttpError."""
    return await prepare_chat(service, service.decode_body(content, ChatRequest))


class ChatStream(OpenAIStream[ChatChunkChoice]):
    """Response to one chat request: one JSON object, or events."""

    def __init__(self, service: Service, answers: ChatAnswers) -> None:
        body = answers.prepared.body
        super().__init__(service, answers, answers.prepared.model, body, "chatcmpl")
        self._answers = answers
        self._role = service.options.response_role
        self._shows_reasoning = body.include_reasoning is not False
        self._sends_ids = bool(body.return_token_ids)
        self._sends_prompt_ids = self._sends_ids and body.continue_token_ids is None
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        # True if the answer's text is its content, and nothing comes with it.
        self._plain = not (answers.prepared.parsed or self._sends_ids) and self._top_logprobs is None
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice: the bytes of an event around its text
        self._unsent_roles = [
            ChatChunkChoice(index=choice.index, delta=ChatDelta(role=self._role, content=""))
            for choice in (answers.whole() if self._streaming and not answers.continued else [])
        ]

    def _usage(self) -> Usage:
        return self._answers.usage()

    def _whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=choice.index,
                message=self._message(choice),
                logprobs=self._logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=list(choice.token_ids) if self._sends_ids else UNSET,
            )
            for choice in self._answers.whole()
        ]
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage(),
            prompt_token_ids=self._take_prompt_ids(),
        )

    def _message(self, choice: AnswerChoice) -> ChatMessage:
        message = ChatMessage(role=self._role, content=choice.content)
        if choice.reasoning and self._shows_reasoning:
            message.reasoning = message.reasoning_content = choice.reasoning
        if choice.tool_calls:
            message.content = choice.content or None
            message.tool_calls = [_whole_call(call) for call in choice.tool_calls]
        return message

    def _outputs(self) -> AsyncIterator[tuple[int, Delta]]:
        return aiter(self._answers.stream)

    def _new_choices(self, number: int, delta: Delta) -> list[ChatChunkChoice]:
        news = self._answers.read_delta(delta)
        # With the first token, not before: load generators take the time of the first chunk as the time of the first
        # token.
        choices, self._unsent_roles = self._unsent_roles, []
        if news.empty and self._top_logprobs is None and not self._sends_ids:
            return choices
        choice = ChatChunkChoice(
            index=news.index,
            delta=self._delta(news),
            logprobs=self._logprobs(news.logprobs),
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
            token_ids=list(news.token_ids) if self._sends_ids else UNSET,
        )
        # The finish reason is a separate chunk, as at OpenAI: some clients read nothing else of that chunk. With token
        # ids, text and finish reason stay in one chunk, so that a gateway counts both or none; it splits them itself.
        says = news.content or news.reasoning or news.tool_calls or choice.logprobs
        if says and news.finish_reason is not None and not self._sends_ids:
            return [*choices, *_without_end(choice)]
        return [*choices, choice]

    def _text_event(self, number: int, delta: Delta) -> bytes | None:
        if not self._plain or not delta.text or delta.finish_reason is not None or self._unsent_roles:
            return None
        self._answers.add_text(delta)
        around = self._around_text.get(delta.index)
        if around is None:
            choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(content=MARK))
            before, _, after = encode_event(self._chunk([choice], None)).partition(msgspec.json.encode(MARK))
            around = self._around_text[delta.index] = before, after
        return around[0] + msgspec.json.encode(delta.text) + around[1]

    def _delta(self, delta: AnswerDelta) -> ChatDelta:
        made = ChatDelta()
        if delta.content or not (delta.reasoning or delta.tool_calls or delta.finish_reason):
            made.content = delta.content
        if delta.reasoning and self._shows_reasoning:
            made.reasoning = made.reasoning_content = delta.reasoning
        if delta.tool_calls:
            made.tool_calls = [_part_of_call(call) for call in delta.tool_calls]
        return made

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
        return self._answers.collector.output.prompt_token_ids

    def _logprobs(self, positions: Sequence[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        if self._top_logprobs is None:
            return None
        return chat_logprobs(positions or [], self._top_logprobs, self._frontend.token_bytes)


def _without_end(choice: ChatChunkChoice) -> list[ChatChunkChoice]:
    """A chunk's choice as two: its content, and its finish reason."""
    end = ChatChunkChoice(
        index=choice.index, delta=ChatDelta(), finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
    )
    return [msgspec.structs.replace(choice, finish_reason=None, stop_reason=None), end]


def _whole_call(call: ToolCall) -> ChatToolCall:
    if call.form is not None:
        return ChatToolCall(id=call.id, type="custom", custom=CustomCall(name=call.name, input=call.arguments))
    return ChatToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


def _part_of_call(call: ToolCallDelta) -> ChatToolCallDelta:
    if call.form is not None:
        custom = CustomCall(name=call.name or "", input=call.arguments)
        return ChatToolCallDelta(index=call.index, id=call.id or UNSET, type="custom", custom=custom)
    part = ChatToolCallDelta(index=call.index, function=FunctionCall(name=call.name, arguments=call.arguments))
    if call.id is not None:
        part.id, part.type = call.id, "function"
    return part
