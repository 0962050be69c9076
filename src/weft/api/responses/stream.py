"""/v1/responses: the answer as one object, or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from weft.api.conversation.chat_answer import AnswerDelta, ChatAnswers, ToolCallDelta, open_answers
from weft.api.conversation.marks import StreamMarks, event_mark
from weft.api.responses.errors import encode_event, error_event
from weft.api.responses.prepare import PreparedResponse, prepare_response
from weft.api.responses.types import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningConfig,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    ShellCallItem,
    TextConfig,
    TextFormat,
    TextLogprob,
    TopTokenLogprob,
)
from weft.api.service.continuation import check_continuation_key
from weft.api.service.logprobs import chat_logprobs
from weft.api.service.service import Service
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.outputs import Logprob
from weft.http.errors import JsonResponse, describe_error
from weft.http.sse import KEEPALIVE, StreamFormat, send_reply

CallItem = FunctionCallItem | CustomToolCallItem | ShellCallItem
Item = MessageItem | ReasoningItem | CallItem


async def responses(request: Request) -> Response:
    """/v1/responses."""
    service: Service = request.app.state.service
    prepared = await service.prepare_in_steps(request, prepare_response)
    check_continuation_key(request, prepared.body)
    report = prepared.chat.report(service, request)
    stream = ResponseStream(service.frontend, open_answers(service, prepared.chat), prepared)
    return await send_reply(
        request,
        stream,
        streaming=bool(prepared.body.stream),
        events=stream.events,
        whole=stream.whole,
        keepalive_s=service.options.keepalive_interval,
        stream_format=StreamFormat("text/event-stream", stream.encode_error, KEEPALIVE + stream.marks()),
        report=report,
    )


class ResponseStream:
    """The answer to one request. Its items grow one after the other: at most the last one is open."""

    def __init__(self, frontend: Frontend, answers: ChatAnswers, prepared: PreparedResponse) -> None:
        self._frontend, self._answers, self._ids = frontend, answers, answers.ids
        common = prepared.chat.body
        self._top_logprobs = (common.top_logprobs or 0) if common.logprobs else None
        self._response = _new_response(prepared, answers)
        self._open: Item | None = None
        self._cut = False  # by max_output_tokens
        self._reasoning_tokens = 0
        for delta in answers.begun:
            list(self._item_events(delta))  # items that another server has sent
        state = prepared.chat.state
        self._sequence = state.events if state is not None else 0
        # The last events repeat all logprobs, which a server that continues the stream does not have.
        self.marks = StreamMarks(event_mark, wants=bool(prepared.body.return_token_ids) and not common.logprobs)

    async def aclose(self) -> None:
        """Abort what has not ended."""
        await self._answers.aclose()

    async def whole(self) -> Response:
        """The response, once it is complete."""
        async for delta in self._answers:
            for _ in self._item_events(delta):
                pass  # the items grow
        for _ in self._end_events():
            pass
        return JsonResponse(self._response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the response."""
        begun = [
            ResponseEvent(type=kind, response=self._response) for kind in ("response.created", "response.in_progress")
        ]
        yield self.marks()
        if not self._sequence:
            yield self._encode(begun) + self.marks()
        async for delta in self._answers:
            yield self.marks.part(self._encode(self._item_events(delta)), delta)
        yield self.marks.end(self._encode(self._end_events()))

    def encode_error(self, error: Exception) -> bytes:
        """The last events of a response that breaks."""
        _, body, _ = describe_error(error)
        response = self._response
        response.status = "failed"
        response.error = ResponseError(code=body.code or "server_error", message=body.message)
        failed = ResponseEvent(type="response.failed", response=response)
        return self._encode([failed, error_event(error)])

    def _encode(self, events: Iterator[ResponseEvent] | Sequence[ResponseEvent]) -> bytes:
        """Events as bytes, encoded at once, since their objects change later."""
        made = []
        for event in events:
            made.append(encode_event(event, self._sequence))
            self._sequence += 1
        return b"".join(made)

    # Items

    def _item_events(self, delta: AnswerDelta) -> Iterator[ResponseEvent]:
        self._cut |= delta.finish_reason == "length"
        for call in delta.continued_calls:
            yield from self._add_call(call)
        if delta.reasoning:
            if not (delta.content or delta.tool_calls):
                self._reasoning_tokens += len(delta.token_ids)
            yield from self._add_reasoning(delta.reasoning)
        if delta.content:
            yield from self._add_text(delta.content, self._logprobs(delta.logprobs))
        for call in delta.new_calls:
            yield from self._add_call(call)

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(id=self._ids.hexadecimal("rs"), status="in_progress", content=[])
            yield from self._begin(item)
            item.content.append(ReasoningText(text=""))
            yield self._event("content_part.added", content_index=0, part=item.content[0])
        assert isinstance(self._open, ReasoningItem)
        self._open.content[0].text += text
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _add_text(self, text: str, logprobs: list[TextLogprob]) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, MessageItem):
            item = MessageItem(id=self._ids.hexadecimal("msg"), status="in_progress", content=[])
            yield from self._begin(item)
            item.content.append(OutputText(text=""))
            yield self._event("content_part.added", content_index=0, part=item.content[0])
        assert isinstance(self._open, MessageItem)
        self._open.content[0].text += text
        self._open.content[0].logprobs += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_call(self, call: ToolCallDelta) -> Iterator[ResponseEvent]:
        if call.id is not None:
            yield from self._begin(self._new_call(call, call.id))
        if isinstance(self._open, CustomToolCallItem):
            self._open.input = call.arguments  # it comes whole
            yield self._event("custom_tool_call_input.delta", delta=call.arguments)
        elif isinstance(self._open, FunctionCallItem) and call.arguments:
            self._open.arguments += call.arguments
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _new_call(self, call: ToolCallDelta, id: str) -> CallItem:
        """The item of a call in the client's form; the item of a custom tool still without its input."""
        name, form = call.name or "", call.form
        space = UNSET if form is None or form.namespace is None else form.namespace
        if form is not None and form.kind == "custom":
            own_id = self._ids.hexadecimal("ctc")
            return CustomToolCallItem(
                id=own_id, status="in_progress", call_id=id, name=form.name, namespace=space, input=""
            )
        action = read_action(call.arguments) if form is not None and form.kind == "local_shell" else None
        if action is not None:
            return ShellCallItem(id=self._ids.hexadecimal("lsh"), status="in_progress", call_id=id, action=action)
        return FunctionCallItem(
            id=self._ids.hexadecimal("fc"),
            status="in_progress",
            call_id=id,
            name=form.name if form is not None else name,
            namespace=space,
            arguments="",
        )

    def _begin(self, item: Item) -> Iterator[ResponseEvent]:
        yield from self._end_item("completed")
        self._open = item
        self._response.output.append(item)
        index = len(self._response.output) - 1
        yield ResponseEvent(type="response.output_item.added", output_index=index, item=item)

    def _end_item(self, status: str) -> Iterator[ResponseEvent]:
        """End the open item, if any."""
        item, index = self._open, len(self._response.output) - 1
        match item:
            case None:
                return
            case MessageItem(content=[part]):
                yield self._event("output_text.done", content_index=0, text=part.text, logprobs=part.logprobs)
                yield self._event("content_part.done", content_index=0, part=part)
            case ReasoningItem(content=[thought]):
                yield self._event("reasoning_text.done", content_index=0, text=thought.text)
                yield self._event("content_part.done", content_index=0, part=thought)
            case CustomToolCallItem():
                yield self._event("custom_tool_call_input.done", input=item.input)
            case FunctionCallItem():
                yield self._event("function_call_arguments.done", name=item.name, arguments=item.arguments)
        item.status = status
        self._open = None
        yield ResponseEvent(type="response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        """An event about the open item."""
        assert self._open is not None
        index = len(self._response.output) - 1
        return ResponseEvent(type=f"response.{kind}", item_id=self._open.id, output_index=index, **fields)

    def _end_events(self) -> Iterator[ResponseEvent]:
        status = "incomplete" if self._cut else "completed"
        yield from self._end_item(status)
        response = self._response
        response.status, response.usage = status, self._usage()
        if self._cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        yield ResponseEvent(type=f"response.{status}", response=response)

    def _usage(self) -> ResponseUsage:
        usage = self._answers.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _logprobs(self, positions: Sequence[dict[int, Logprob]] | None) -> list[TextLogprob]:
        if self._top_logprobs is None or not positions:
            return []
        rows = chat_logprobs(positions, self._top_logprobs, self._frontend.token_bytes).content
        return [
            TextLogprob(
                token=row.token,
                logprob=row.logprob,
                bytes=row.bytes,
                top_logprobs=[
                    TopTokenLogprob(token=top.token, logprob=top.logprob, bytes=top.bytes) for top in row.top_logprobs
                ],
            )
            for row in rows
        ]


def read_action(arguments: str) -> dict[str, Any] | None:
    """The action of a shell's call; None for arguments that name no command, such as cut ones."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
        command = msgspec.convert(given.pop("command"), list[str])
    except (msgspec.MsgspecError, KeyError, RecursionError):
        return None
    return {"type": "exec", "command": command, "env": {}, **given}


def _new_response(prepared: PreparedResponse, answers: ChatAnswers) -> ResponseObject:
    """The response before its first item."""
    body, params = prepared.body, answers.collector.params
    text = body.text or TextConfig()
    return ResponseObject(
        id=answers.ids.hexadecimal("resp"),
        created_at=prepared.chat.state.created if prepared.chat.state is not None else int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=prepared.chat.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or ReasoningConfig(),
        temperature=params.temperature,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
