"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.api.anthropic.prepare import PreparedMessages, count_tokens, prepare_messages
from weft.api.anthropic.types import (
    AnthropicAnswer,
    AnthropicUsage,
    ContentDelta,
    EndDelta,
    StreamEvent,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from weft.api.conversation.chat_answer import AnswerChoice, AnswerDelta, ChatAnswers, ToolCallDelta, open_answers
from weft.api.conversation.marks import StreamMarks, event_mark
from weft.api.service.continuation import check_continuation_key
from weft.api.service.service import Service
from weft.http.errors import JsonResponse
from weft.http.sse import StreamFormat, encode_error_event, send_reply

PATH = "/v1/messages"


async def messages(request: Request) -> Response:
    """/v1/messages."""
    service: Service = request.app.state.service
    prepared = await service.prepare_in_steps(request, prepare_messages)
    check_continuation_key(request, prepared.body)
    report = prepared.chat.report(service, request)
    stream = MessageStream(open_answers(service, prepared.chat), prepared)
    return await send_reply(
        request,
        stream,
        streaming=bool(prepared.body.stream),
        events=stream.events,
        whole=stream.whole,
        keepalive_s=service.options.keepalive_interval,
        stream_format=stream.format,
        report=report,
    )


async def count(request: Request) -> Response:
    """/v1/messages/count_tokens."""
    service: Service = request.app.state.service
    return JsonResponse(TokenCount(await service.prepare_in_steps(request, count_tokens)))


def encode_named(event: StreamEvent) -> bytes:
    """An event with its name, which is its type."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), msgspec.json.encode(event))


EVENTS = StreamFormat(
    "text/event-stream", partial(encode_error_event, path=PATH), encode_named(StreamEvent(type="ping"))
)


class MessageStream:
    """The answer to one request: an object, or events. One block is open at a time."""

    def __init__(self, answers: ChatAnswers, prepared: PreparedMessages) -> None:
        self._answers = answers
        self._shows_thinking = prepared.shows_thinking
        self._model = prepared.chat.model
        self._stops = prepared.body.stop_sequences or []
        self._id = answers.ids.hexadecimal("msg")
        self._index = -1  # of the open block, or of the last one
        self._open = ""  # type of the open block
        state = prepared.chat.state
        self._events_sent = state is not None and state.events > 0
        self._marks = StreamMarks(event_mark, wants=bool(prepared.body.return_token_ids))
        for delta in answers.begun:
            list(self._block_events(delta))  # events that another server has sent

    @property
    def format(self) -> StreamFormat:
        return replace(EVENTS, keepalive=EVENTS.keepalive + self._marks())

    async def aclose(self) -> None:
        """Abort what has not ended."""
        await self._answers.aclose()

    async def whole(self) -> Response:
        """The answer as one object."""
        await self._answers.finish()
        choice = self._answers.whole()[0]
        answer = self._answer(list(self._blocks(choice)))
        answer.stop_reason, answer.stop_sequence = self._end(choice)
        return JsonResponse(answer)

    def _answer(self, content: list[Any]) -> AnthropicAnswer:
        return AnthropicAnswer(id=self._id, content=content, model=self._model, usage=self._usage())

    def _blocks(self, choice: AnswerChoice) -> Iterator[TextBlock | ThinkingBlock | ToolUseBlock]:
        thinking = bool(choice.reasoning) and self._shows_thinking
        if thinking:
            yield ThinkingBlock(thinking=choice.reasoning)
        if choice.content or not (thinking or choice.tool_calls):
            yield TextBlock(text=choice.content)
        for call in choice.tool_calls:
            yield ToolUseBlock(id=call.id, name=call.name, input=read_arguments(call.arguments))

    def _usage(self) -> AnthropicUsage:
        usage = self._answers.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return AnthropicUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )

    def _end(self, choice: AnswerChoice) -> tuple[str, str | None]:
        """Anthropic's stop reason, and the stop sequence that was met."""
        if choice.finish_reason == "length":
            return "max_tokens", None
        if isinstance(choice.stop_reason, str) and choice.stop_reason in self._stops:
            return "stop_sequence", choice.stop_reason
        return ("tool_use" if choice.tool_calls else "end_turn"), None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        yield self._marks()
        if not self._events_sent:
            start = encode_named(StreamEvent(type="message_start", message=self._answer([])))
            yield start + EVENTS.keepalive + self._marks()
        async for delta in self._answers:
            yield self._marks.part(b"".join(map(encode_named, self._block_events(delta))), delta)
        yield self._marks.end(b"".join(map(encode_named, self._last_events())))

    def _last_events(self) -> Iterator[StreamEvent]:
        if self._index < 0:
            yield from self._open_block(TextBlock(text=""))
        reason, sequence = self._end(self._answers.whole()[0])
        end = EndDelta(stop_reason=reason, stop_sequence=sequence)
        yield from self._close_block()
        yield StreamEvent(type="message_delta", delta=end, usage=self._usage())
        yield StreamEvent(type="message_stop")

    def _block_events(self, delta: AnswerDelta) -> Iterator[StreamEvent]:
        for call in delta.continued_calls:
            yield from self._call_events(call)
        if delta.reasoning and self._shows_thinking:
            if self._open != "thinking":
                yield from self._open_block(ThinkingBlock(thinking=""))
            yield self._delta(ContentDelta(type="thinking_delta", thinking=delta.reasoning))
        if delta.content:
            if self._open != "text":
                yield from self._open_block(TextBlock(text=""))
            yield self._delta(ContentDelta(type="text_delta", text=delta.content))
        for call in delta.new_calls:
            yield from self._call_events(call)

    def _call_events(self, call: ToolCallDelta) -> Iterator[StreamEvent]:
        if call.id is not None:
            yield from self._open_block(ToolUseBlock(id=call.id, name=call.name or "", input={}))
        if call.arguments:
            yield self._delta(ContentDelta(type="input_json_delta", partial_json=call.arguments))

    def _delta(self, delta: ContentDelta) -> StreamEvent:
        return StreamEvent(type="content_block_delta", index=self._index, delta=delta)

    def _open_block(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[StreamEvent]:
        yield from self._close_block()
        self._index += 1
        self._open = block.type
        yield StreamEvent(type="content_block_start", index=self._index, content_block=block)

    def _close_block(self) -> Iterator[StreamEvent]:
        if self._open == "thinking":
            yield self._delta(ContentDelta(type="signature_delta", signature=""))
        if self._open:
            yield StreamEvent(type="content_block_stop", index=self._index)
        self._open = ""


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; an empty object if `max_tokens` has cut the call."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
