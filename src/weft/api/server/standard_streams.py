"""StreamEngine: a model behind standard input and output, one JSON object a line, as Infernet's node drives an engine.

The messages follow version 1 of packages/engine/src/protocol.js of profullstack/infernet-protocol (April 2026):

    in:  load {model}; generate {id, messages, model, max_tokens, temperature}; cancel {id}; shutdown
    out: ready {model}; meta {id, model, started_at}; token {id, text}; done {id, reason, text, finished_at};
         error {id, message}; log {level, message}

All of them have `v` and `type`. `reason` is "stop", "length" or "cancel". An `error` without `id` is of no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from weft.engine.frontend.outputs import RequestOutput
from weft.errors import RequestError, WeftError

VERSION = 1
LINE_BYTES = 2**26  # bytes of one message: longer than the longest context as JSON
FIRST_LINE_S = 1.0  # seconds to wait for `load` before an engine without a model says that it is ready


class Load(msgspec.Struct, tag="load"):
    """Load a model in place of the loaded model."""

    v: int
    model: str | None = None


class Generate(msgspec.Struct, tag="generate"):
    """Answer a conversation. `model` None means the loaded model."""

    v: int
    id: str
    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters; None for parameters that are left out."""
        return {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop")}


class Cancel(msgspec.Struct, tag="cancel"):
    """End a request; its `done` has the text so far."""

    v: int
    id: str


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End the engine."""

    v: int


Message = Load | Generate | Cancel | Shutdown
MESSAGE: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class LoadedModel(Protocol):
    """A model that answers conversations."""

    names: tuple[str, ...]

    def chat(self, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer while it grows. Raises WeftError."""
        ...

    async def close(self) -> None:
        """Free the model's memory."""
        ...


class StreamEngine:
    """Reads messages, and writes events with `write`, until `shutdown` or the end of the input.

    `load` opens a model by name; it raises WeftError. `model` is the initial model.
    """

    def __init__(
        self,
        load: Callable[[str], Awaitable[LoadedModel]],
        write: Callable[[bytes], None],
        model: str | None = None,
        first_line_s: float = FIRST_LINE_S,
    ) -> None:
        self._load, self._write, self._first = load, write, model
        self._first_line_s = first_line_s
        self._model: LoadedModel | None = None
        self._loading = asyncio.Lock()  # held while the model changes
        self._users = 0  # requests that the model answers
        self._unused = asyncio.Event()
        self._unused.set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._ready = False

    async def serve_lines(self, lines: AsyncIterator[bytes]) -> None:
        """Serve until the end; the model is closed then."""
        starting = asyncio.create_task(self._start())
        others: set[asyncio.Task[None]] = {starting}
        try:
            async for line in lines:
                message = self._decode(line)
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, Load):
                    self._ready = True  # sent once the model is loaded
                    task = asyncio.create_task(self._open(message.model))
                    others.add(task)
                    task.add_done_callback(others.discard)
                elif isinstance(message, Generate):
                    self._begin(message)
                elif message is not None:
                    self._cancel(message.id)
        finally:
            ending = [*self._tasks.values(), *others]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            if self._model is not None:
                await self._model.close()

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        self._write(msgspec.json.encode({"v": VERSION, "type": kind, **fields}) + b"\n")

    def _decode(self, line: bytes) -> Message | None:
        """A line's message; None, with an `error` event, for any other line."""
        if len(line) > LINE_BYTES:
            self.emit("error", message=f"a line is longer than {LINE_BYTES:,} bytes; it is skipped: send less")
            return None
        if not line.strip():
            return None
        try:
            message = MESSAGE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.emit("error", message=f"a line is no message of this protocol: {error}")
            return None
        if message.v != VERSION:
            self.emit("error", message=f"a message has version {message.v}; this engine speaks version {VERSION}")
            return None
        return message

    async def _start(self) -> None:
        """Load the first model; without a first model report `ready`, unless `load` arrives at once."""
        if self._first is not None:
            await self._open(self._first)
            return
        await asyncio.sleep(self._first_line_s)
        if not self._ready:
            self.emit("ready", model=None)

    async def _open(self, name: str | None) -> None:
        """Load a model after the requests to the previous model have ended, and report `ready`."""
        try:
            model = await self._opened(name)
        except WeftError as error:
            self.emit("error", message=str(error))
        else:
            self.emit("ready", model=name or model.names[0])

    async def _opened(self, name: str | None) -> LoadedModel:
        """The model of this name, loaded in place of another if needed. Raises WeftError."""
        async with self._loading:
            name = name or self._first
            if self._model is not None and (name is None or name in self._model.names):
                return self._model
            if self._model is not None:
                await self._unused.wait()  # requests that arrive until then wait for the lock
                before, self._model = self._model, None
                await before.close()
            return await self._load_named(name)

    async def _load_named(self, name: str | None) -> LoadedModel:
        """Load a model while none is loaded, with the lock held. Raises WeftError."""
        name = name or self._first
        if name is None:
            raise RequestError(
                "no model is loaded; name one in `load`, in `generate` or in INFERNET_ENGINE_MODEL",
                code="model-missing",
            )
        self._model = await self._load(name)
        return self._model

    def _begin(self, request: Generate) -> None:
        if request.id in self._tasks:
            self.emit("log", level="warn", message=f"the request {request.id!r:.100} runs already; it is not run twice")
            return
        task = asyncio.create_task(self._answer(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda ended: self._note_end(request.id, ended))

    def _note_end(self, id: str, task: asyncio.Task[None]) -> None:
        """Forget a request. A request that was cancelled before its task began has not sent any event yet."""
        del self._tasks[id]
        if id in self._cancelled:
            self._cancelled.discard(id)
            if task.cancelled():
                self._emit_cancelled(id, "")

    def _emit_cancelled(self, id: str, text: str) -> None:
        self.emit("done", id=id, reason="cancel", text=text, finished_at=_now())

    def _cancel(self, id: str) -> None:
        if id in self._tasks:
            self._cancelled.add(id)
            self._tasks[id].cancel()

    async def _answer(self, request: Generate) -> None:
        """Answer one request. A failure is an event, and does not affect other requests."""
        id, text = request.id, ""
        try:
            async with self._using_model(request.model) as model:
                self.emit("meta", id=id, model=request.model or model.names[0], started_at=_now())
                reason = "stop"
                async with aclosing(model.chat(request.messages, request.sampling)) as answers:
                    async for output in answers:
                        choice = output.outputs[0]
                        if len(choice.text) > len(text):
                            self.emit("token", id=id, text=choice.text[len(text) :])
                            text = choice.text
                        reason = choice.finish_reason or reason
            self.emit("done", id=id, reason="length" if reason == "length" else "stop", text=text, finished_at=_now())
        except asyncio.CancelledError:
            if id not in self._cancelled:
                raise
            self._emit_cancelled(id, text)
        except WeftError as error:
            self.emit("error", id=id, message=str(error))
        except Exception as error:
            self.emit("error", id=id, message=f"{type(error).__name__}: {error}")
        finally:
            self._cancelled.discard(id)

    @asynccontextmanager
    async def _using_model(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """Hold the loaded model, if it has this name; load it if no model is loaded. Raises WeftError.

        A request never takes the model of others away: only `load` changes it, once no request holds it.
        """
        async with self._loading:
            model = self._model or await self._load_named(name)
            if name is not None and name not in model.names:
                known = ", ".join(model.names)
                raise RequestError(
                    f"the model {name!r:.200} is not loaded; known: {known}; `load` changes it", code="model-not-found"
                )
            self._users += 1
            self._unused.clear()
        try:
            yield model
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()


async def bounded_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a stream until its end; a line longer than LINE_BYTES is cut to LINE_BYTES + 1 bytes.

    The stream's limit must be LINE_BYTES.
    """
    start = b""  # inside a line that is too long
    while True:
        try:
            line = await reader.readuntil()
        except asyncio.LimitOverrunError as error:
            part = await reader.readexactly(max(1, error.consumed))
            start = start or part[: LINE_BYTES + 1]
            continue
        except asyncio.IncompleteReadError as end:
            line = end.partial
        if not start and not line:
            return
        yield start or line
        start = b""


def _now() -> str:
    """The time in RFC 3339, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
