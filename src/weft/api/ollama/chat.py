"""/api/chat and /api/generate."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from weft.api.conversation.chat_answer import AnswerDelta, ChatAnswers, ToolCall, open_answers
from weft.api.conversation.marks import StreamMarks, line_mark
from weft.api.ollama.details import timestamp
from weft.api.ollama.loading import load_or_unload, may_unload
from weft.api.ollama.prepare import Prepared, prepare_generate, prepare_ollama_chat
from weft.api.ollama.stream import NDJSON, encode_line
from weft.api.ollama.types import (
    AnswerMessage,
    AnswerPart,
    ChatAnswer,
    GenerateAnswer,
    OllamaTokenLogprob,
    OllamaToolCall,
    PositionLogprobs,
    ToolCallFunction,
)
from weft.api.service.continuation import check_continuation_key
from weft.api.service.logprobs import chat_logprobs
from weft.api.service.service import Service
from weft.engine.frontend.outputs import Logprob
from weft.http.errors import JsonResponse
from weft.http.sse import StreamFormat, send_reply

NS = 10**9


async def chat(request: Request) -> Response:
    """/api/chat."""
    service: Service = request.app.state.service
    prepared = await service.prepare_in_steps(request, prepare_ollama_chat)
    return await _reply(request, prepared, ChatParts)


async def generate(request: Request) -> Response:
    """/api/generate."""
    service: Service = request.app.state.service
    prepared = await service.prepare_in_steps(request, prepare_generate)
    return await _reply(request, prepared, GenerateParts)


async def _reply(request: Request, prepared: Prepared, kind: type[OllamaAnswer]) -> Response:
    service: Service = request.app.state.service
    check_continuation_key(request, prepared.body)
    unloads = may_unload(request, prepared.body.keep_alive)
    if prepared.chat is None:
        # Clients load a model by asking for nothing, and unload it by a `keep_alive` of 0.
        load_or_unload(service, unloads)
        return JsonResponse(kind.part(prepared.name, "", done=True, done_reason="unload" if unloads else "load"))
    report = prepared.chat.report(service, request)
    answer = kind(service, open_answers(service, prepared.chat), prepared)
    if unloads:
        answer.at_end = lambda: load_or_unload(service, unloads)
    return await send_reply(
        request,
        answer,
        streaming=prepared.body.stream is not False,
        events=answer.lines,
        whole=answer.whole,
        keepalive_s=service.options.keepalive_interval,
        stream_format=answer.format,
        report=report,
    )


class OllamaAnswer(ABC):
    """One answer, as lines of JSON or as one object."""

    def __init__(self, service: Service, answers: ChatAnswers, prepared: Prepared) -> None:
        self._frontend = service.frontend
        self._answers = answers
        self._name = prepared.name
        self._shows_reasoning = prepared.shows_reasoning
        self._top_logprobs = (prepared.body.top_logprobs or 0) if answers.prepared.body.logprobs else None
        self._told_calls = 0
        self.at_end: Callable[[], None] = lambda: None
        self._marks = StreamMarks(line_mark, wants=bool(prepared.body.return_token_ids))
        if answers.begun:
            self._new_calls(last=False)  # parts that another server has sent

    @staticmethod
    @abstractmethod
    def part(
        name: str, text: str, *, thinking: str = "", calls: Sequence[OllamaToolCall] = (), **fields: Any
    ) -> AnswerPart:
        """A part of an answer."""

    @property
    def format(self) -> StreamFormat:
        # A part without text: clients skip it, and parse every line.
        return replace(NDJSON, keepalive=self._marks() or encode_line(self.part(self._name, "")))

    async def aclose(self) -> None:
        """Abort what has not ended."""
        await self._answers.aclose()
        self.at_end()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The parts of the answer; the last has no text, but counts and times."""
        reason = "stop"
        yield self._marks()
        async for delta in self._answers:
            reason = delta.finish_reason or reason
            part = self._delta_part(delta)
            yield self._marks.part(b"" if part is None else encode_line(part), delta)
        yield self._marks.end(encode_line(self.part(self._name, "", **self._end(reason))))

    def _delta_part(self, delta: AnswerDelta) -> AnswerPart | None:
        thinking = delta.reasoning if self._shows_reasoning else ""
        calls = self._new_calls(last=delta.finish_reason is not None)
        logprobs = self._logprobs(delta.logprobs)
        if not (delta.content or thinking or calls or logprobs):
            return None
        return self.part(self._name, delta.content, thinking=thinking, calls=calls, logprobs=logprobs or UNSET)

    def _new_calls(self, *, last: bool) -> list[OllamaToolCall]:
        """The complete calls that were not sent yet: all but the last call, which continues until the end."""
        made = self._answers.whole()[0].tool_calls
        complete = made if last else made[:-1]
        new, begun = complete[self._told_calls :], self._told_calls
        self._told_calls = max(begun, len(complete))
        return read_calls(new, begun)

    async def whole(self) -> Response:
        """The answer as one object."""
        await self._answers.finish()
        choice = self._answers.whole()[0]
        logprobs = self._logprobs(choice.logprobs)
        return JsonResponse(
            self.part(
                self._name,
                choice.content,
                thinking=choice.reasoning if self._shows_reasoning else "",
                calls=read_calls(choice.tool_calls),
                logprobs=logprobs or UNSET,
                **self._end(choice.finish_reason or "stop"),
            )
        )

    def _end(self, reason: str) -> dict[str, Any]:
        """The fields of the last part. The time in the queue stands in Ollama's field for loading."""
        usage, times = self._answers.usage(), self._answers.collector.output.metrics
        now = time.monotonic()
        first = times.first_token_s or now
        began = times.scheduled_s or first
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int((now - times.arrival_s) * NS),
            "load_duration": max(0, int((began - times.arrival_s) * NS)),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(0, int((first - began) * NS)),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(0, int((now - first) * NS)),
        }

    def _logprobs(self, positions: Sequence[dict[int, Logprob]] | None) -> list[PositionLogprobs]:
        if self._top_logprobs is None or not positions:
            return []
        rows = chat_logprobs(positions, self._top_logprobs, self._frontend.token_bytes).content
        return [
            PositionLogprobs(
                token=row.token,
                logprob=row.logprob,
                bytes=row.bytes,
                top_logprobs=[
                    OllamaTokenLogprob(token=t.token, logprob=t.logprob, bytes=t.bytes) for t in row.top_logprobs
                ],
            )
            for row in rows
        ]


class ChatParts(OllamaAnswer):
    """An answer of /api/chat."""

    @staticmethod
    def part(
        name: str, text: str, *, thinking: str = "", calls: Sequence[OllamaToolCall] = (), **fields: Any
    ) -> AnswerPart:
        message = AnswerMessage(content=text, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET)
        return ChatAnswer(model=name, created_at=timestamp(time.time()), message=message, **fields)


class GenerateParts(OllamaAnswer):
    """An answer of /api/generate."""

    @staticmethod
    def part(
        name: str, text: str, *, thinking: str = "", calls: Sequence[OllamaToolCall] = (), **fields: Any
    ) -> AnswerPart:
        shown: str | UnsetType = thinking or UNSET
        now = timestamp(time.time())
        return GenerateAnswer(
            model=name, created_at=now, response=text, thinking=shown, tool_calls=list(calls) or UNSET, **fields
        )


def read_calls(calls: Sequence[ToolCall], begun: int = 0) -> list[OllamaToolCall]:
    """Calls whose arguments are an object, as Ollama's API requires; a call that `num_predict` has cut is left out."""
    read: list[OllamaToolCall] = []
    for number, call in enumerate(calls, begun):
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError:
            continue
        read.append(
            OllamaToolCall(id=call.id, function=ToolCallFunction(name=call.name, arguments=arguments, index=number))
        )
    return read
