"""An open loop: requests are sent when they are due, whatever has become of those before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Literal

import msgspec

from weft.bench.http import HttpClient, HttpFailure, HttpRefusal
from weft.bench.prompts import Prompt

Api = Literal["openai", "openai-chat"]
PATHS: dict[Api, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
BEAT_S = 0.02  # how often the client looks whether its own loop is late
MOST_ERROR_CHARS = 200


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request, by the monotonic clock: when it was due, when it began to be sent, and when each piece of its
    answer came. `error` is None where that came whole. Tokens are as the server counts them."""

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
        """Seconds to the first token, the making of a connection included."""
        return self.pieces_s[0] - self.began_s

    @property
    def e2e_s(self) -> float:
        return self.pieces_s[-1] - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for an answer of one."""
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def late_s(self) -> float:
        """How late the client was, by no fault of the server's."""
        return self.began_s - (self.due_s if self.held_until_s is None else self.held_until_s)


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """A load that has been laid on: its records, when it began and ended, and how late the client's loop was at each
    of its own beats."""

    records: list[RequestRecord]
    began_s: float
    ended_s: float
    beats_late_s: list[float]
    most_at_once: int
    interrupted: bool = False  # cancelled before its end; `records` are the requests that had ended by then

    @property
    def seconds(self) -> float:
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
    """Reads one stream of events into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record, self._rest = record, b""
        self.finished = False  # a reason for the end has come, or the end mark

    def __call__(self, data: bytes, now_s: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
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
            raise HttpFailure(f"an event that is none of OpenAI's: {error}") from None
        if event.error is not None:
            raise HttpFailure(f"in the stream: {error_text(event.error)}")
        if (usage := event.usage) is not None:
            record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = (details and details.cached_tokens) or 0
        for choice in event.choices:
            said = choice.text
            if piece := choice.delta:
                said = piece.content or piece.reasoning_content or piece.reasoning or (piece.tool_calls and "call")
            self.finished |= choice.finish_reason is not None
            # A last token may have no text: the end of half a character, or one that is not shown.
            if said or (choice.finish_reason is not None and not record.pieces_s):
                record.pieces_s.append(now_s)


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests are asked: by which API (at its own path where `path` is None) and of which model; `extra` goes
    into every body."""

    api: Api = "openai"
    path: str | None = None
    model: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = {}
    timeout_s: float = 600.0

    def body(self, prompt: Prompt) -> bytes:
        """The JSON of one request."""
        what: dict[str, Any] = {"prompt": prompt.content}
        if self.api == "openai-chat":
            talk = prompt.content
            what = {"messages": talk if isinstance(talk, list) else [{"role": "user", "content": talk}]}
        fields: dict[str, Any] = {"max_tokens": prompt.output_len, "temperature": self.temperature, "stream": True}
        if self.model is not None:
            fields["model"] = self.model
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**what, **fields, "stream_options": {"include_usage": True}, **self.extra})


async def run_open_loop(
    client: HttpClient,
    asking: RequestOptions,
    prompts: Sequence[Prompt],
    due: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[RequestRecord], object] = lambda record: None,
) -> LoadResult:
    """Send each prompt at its time, seconds from now, and hear all answers to the end. With `max_concurrency` no more
    than that are under way at once, and those that are due wait in order. Failures are in the records.

    Cancelled (Ctrl-C), it gives up the requests under way and returns the Load of those that had ended, if any had.
    """
    bodies = [asking.body(prompt) for prompt in prompts]  # before the clock runs
    turns = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    running = most = 0
    began = monotonic()
    records = [
        RequestRecord(due_s=began + at, requested_tokens=prompt.output_len)
        for at, prompt in zip(due, prompts, strict=True)
    ]
    late: list[float] = []

    async def one(record: RequestRecord, body: bytes) -> None:
        nonlocal running, most
        if turns is not None:
            if turns.locked():
                await turns.acquire()
                record.held_until_s = monotonic()
            else:
                await turns.acquire()
        running += 1
        most = max(most, running)
        try:
            await send_request(client, asking, record, body)
        finally:
            running -= 1
            if turns is not None:
                turns.release()
        on_end(record)

    beat = asyncio.create_task(_beat(late))
    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for record, body in zip(records, bodies, strict=True):
                if (wait := record.due_s - monotonic()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(record, body))
    except asyncio.CancelledError:
        records = [record for record in records if record.ended_s]
        if not records:
            raise
        interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()  # handled: the figures so far are the answer to it
    finally:
        ended = monotonic()
        beat.cancel()
        with suppress(asyncio.CancelledError):
            await beat
    return LoadResult(
        records=records,
        began_s=began,
        ended_s=ended,
        beats_late_s=late,
        most_at_once=most,
        interrupted=interrupted,
    )


async def send_request(client: HttpClient, asking: RequestOptions, record: RequestRecord, body: bytes) -> None:
    """One request from its beginning to its end, whichever that is."""
    listener = StreamListener(record)
    record.began_s = monotonic()
    try:
        async with asyncio.timeout(asking.timeout_s):
            await client.post(asking.path or PATHS[asking.api], body, listener)
        if not listener.finished or not record.pieces_s:
            record.error = "the stream ended before the answer"
    except TimeoutError:
        record.error = f"no end after {asking.timeout_s:g} s"
    except HttpRefusal as error:
        record.error = f"{error}: {error_text(error.body)}"
    except HttpFailure as error:
        record.error = str(error)
    record.ended_s = monotonic()
    if record.error is None and not record.output_tokens:
        record.output_tokens = len(record.pieces_s)  # a server that counts nothing: one token a piece


async def _beat(late: list[float]) -> None:
    while True:
        due = monotonic() + BEAT_S
        await asyncio.sleep(BEAT_S)
        late.append(monotonic() - due)


def error_text(said: Any) -> str:
    """What an error says of itself, whatever form it has; in one line."""
    if isinstance(said, bytes):
        text = said.decode("utf-8", "replace")
        try:
            said = json.loads(text)
        except ValueError:
            said = text
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail") or json.dumps(said)
    return " ".join(str(said).split())[:MOST_ERROR_CHARS] or "no word"
