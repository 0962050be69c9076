"""Open-loop load: each request is sent when it is due, regardless of the requests before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Literal

import msgspec

from weft.study.bench.http import HttpClient, HttpFailure, HttpRefusal
from weft.study.bench.prompts import BenchPrompt

Api = Literal["openai", "openai-chat"]
PATHS: dict[Api, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
BEAT_S = 0.02  # interval at which the client checks if its own event loop is late
MAX_ERROR_CHARS = 200


class RequestRecord(msgspec.Struct, kw_only=True):
    """Times of one request on the monotonic clock: when it was due, was sent, and received each piece of its response.

    `error` is None for a complete response. Tokens are as the server counts them.
    """

    due_s: float
    held_until_s: float | None = None  # by a limit on concurrency
    began_s: float = 0.0
    pieces_s: list[float] = msgspec.field(default_factory=list)
    ended_s: float = 0.0
    requested_tokens: int
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, including the time to connect."""
        return self.pieces_s[0] - self.began_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last piece."""
        return self.pieces_s[-1] - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a response of one token."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def late_s(self) -> float:
        """Seconds between the time that the request was due, or free to go, and its sending: the client's delay."""
        return self.began_s - (self.due_s if self.held_until_s is None else self.held_until_s)


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a finished load, its begin and end, and the delays of the client's event loop at each of its beats."""

    records: list[RequestRecord]
    began_s: float
    ended_s: float
    beats_late_s: list[float]
    most_at_once: int
    interrupted: bool = False  # cancelled before its end; `records` are the requests that had ended by then

    @property
    def seconds(self) -> float:
        """Duration of the load."""
        return self.ended_s - self.began_s


class _Piece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Piece | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class StreamListener:
    """Parses one stream of server-sent events into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record, self._unparsed = record, b""
        self.finished = False  # a finish reason has arrived, or the end mark

    def __call__(self, data: bytes, now_s: float) -> None:
        *lines, self._unparsed = (self._unparsed + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, text: bytes, now_s: float) -> None:
        record = self._record
        if text == b"[DONE]":
            self.finished = True
            return
        try:
            event = _decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise HttpFailure(f"an event that is not in OpenAI's format: {error}", code="event-not-openai") from None
        if event.error is not None:
            raise HttpFailure(f"in the stream: {error_text(event.error)}", code="error-in-stream")
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices:
            content = _content(choice)
            self.finished |= choice.finish_reason is not None
            # The last token may have no text: half a character, or a token that is not shown.
            if content or (choice.finish_reason is not None and not record.pieces_s):
                record.pieces_s.append(now_s)

    def _count(self, usage: _Usage) -> None:
        record, details = self._record, usage.prompt_tokens_details
        record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = (details and details.cached_tokens) or 0


def _content(choice: _Choice) -> str | None:
    """Text of a choice in an event; "call" for a piece of a tool call."""
    piece = choice.delta
    if piece is None:
        return choice.text
    return piece.content or piece.reasoning_content or piece.reasoning or (piece.tool_calls and "call")


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all requests of a load.

    `path` None is the API's own path; `extra` goes into every body.
    """

    api: Api = "openai"
    path: str | None = None
    model: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = {}
    timeout_s: float = 600.0

    def body(self, prompt: BenchPrompt) -> bytes:
        """The JSON of one request."""
        content: dict[str, Any] = {"prompt": prompt.content}
        if self.api == "openai-chat":
            messages = prompt.content
            is_chat = isinstance(messages, list)
            content = {"messages": messages if is_chat else [{"role": "user", "content": messages}]}
        fields: dict[str, Any] = {"max_tokens": prompt.output_len, "temperature": self.temperature, "stream": True}
        if self.model is not None:
            fields["model"] = self.model
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**content, **fields, "stream_options": {"include_usage": True}, **self.extra})


async def run_open_loop(
    client: HttpClient,
    options: RequestOptions,
    prompts: Sequence[BenchPrompt],
    due: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[RequestRecord], object] = lambda record: None,
) -> LoadResult:
    """Send each prompt at its time in `due`, seconds from now, and wait for all responses; errors go into the records.

    With `max_concurrency` at most that many requests are in flight, and due ones wait in order. If the task is
    cancelled (Ctrl-C), the requests in flight are dropped and the result has the requests that had ended, if there are
    any.
    """
    bodies = [options.body(prompt) for prompt in prompts]  # before the clock runs
    begin = monotonic()
    records = [
        RequestRecord(due_s=begin + at, requested_tokens=prompt.output_len)
        for at, prompt in zip(due, prompts, strict=True)
    ]
    sender = _Sender(client, options, max_concurrency, on_end)
    delays: list[float] = []
    beat = asyncio.create_task(_measure_delays(delays))
    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for record, body in zip(records, bodies, strict=True):
                if (wait := record.due_s - monotonic()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(sender.send(record, body))
    except asyncio.CancelledError:
        records = [record for record in records if record.ended_s]
        if not records:
            raise
        interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()  # handled: the caller gets the figures so far
    finally:
        end = monotonic()
        beat.cancel()
        with suppress(asyncio.CancelledError):
            await beat
    return LoadResult(
        records=records,
        began_s=begin,
        ended_s=end,
        beats_late_s=delays,
        most_at_once=sender.most_at_once,
        interrupted=interrupted,
    )


class _Sender:
    """Sends requests, at most `max_concurrency` at once."""

    def __init__(
        self,
        client: HttpClient,
        options: RequestOptions,
        max_concurrency: int | None,
        on_end: Callable[[RequestRecord], object],
    ) -> None:
        self.client, self.options, self.on_end = client, options, on_end
        self.slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self.running = self.most_at_once = 0

    async def send(self, record: RequestRecord, body: bytes) -> None:
        """Wait for a free slot if there is a limit, then send the request and wait for its end."""
        if self.slots is not None:
            held = self.slots.locked()
            await self.slots.acquire()
            if held:
                record.held_until_s = monotonic()
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await send_request(self.client, self.options, record, body)
        finally:
            self.running -= 1
            if self.slots is not None:
                self.slots.release()
        self.on_end(record)


async def send_request(client: HttpClient, options: RequestOptions, record: RequestRecord, body: bytes) -> None:
    """Send one request and record its times, or its error."""
    listener = StreamListener(record)
    record.began_s = monotonic()
    try:
        async with asyncio.timeout(options.timeout_s):
            await client.post(options.path or PATHS[options.api], body, listener)
        if not listener.finished or not record.pieces_s:
            record.error = "the stream ended before the answer"
    except TimeoutError:
        record.error = f"not complete after {options.timeout_s:g} s"
    except HttpRefusal as error:
        record.error = f"{error}: {error_text(error.body)}"
    except HttpFailure as error:
        record.error = str(error)
    record.ended_s = monotonic()
    if record.error is None and not record.output_tokens:
        record.output_tokens = len(record.pieces_s)  # the server reports no usage: one token per piece


async def _measure_delays(delays: list[float]) -> None:
    """Sleep again and again, and append the event loop's delay in seconds each time."""
    while True:
        due = monotonic() + BEAT_S
        await asyncio.sleep(BEAT_S)
        delays.append(monotonic() - due)


def error_text(error: Any) -> str:
    """The message of an error in any of the usual formats, in one line."""
    if isinstance(error, bytes):
        text = error.decode("utf-8", "replace")
        try:
            error = json.loads(text)
        except ValueError:
            error = text
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or json.dumps(error)
    return " ".join(str(error).split())[:MAX_ERROR_CHARS] or "an error without a message"
