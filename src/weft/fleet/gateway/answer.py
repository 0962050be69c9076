"""StreamedAnswer: a streamed completion, and the state from which another replica can continue it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.fleet.gateway.completion import MAX_HELD_IDS, is_id_list
from weft.fleet.gateway.events import DONE, EVENT_BYTES, EventSplitter, event_data
from weft.fleet.gateway.stream_apis import StreamApi
from weft.fleet.upstreams.upstream import ENGINE_RESTARTS, ResponseHead, UpstreamError, error_code

WHOLE_BYTES = 2**24  # largest JSON object that is parsed, in bytes
HEAD_FIELDS = ("id", "created", "model")  # of every chunk; the client gets the first chunk's values


class ResumableAnswer(ABC):
    """An answer from one replica, continued by others if it breaks.

    `continuable`: another replica can continue it. `begun`: token ids that the client gave as its beginning.
    `token_ids`: the ids received so far. `done`: all of it was passed on. `finished`: its last token was passed on.
    `usage`: the upstream's, for the whole answer. `sent_events`: number of events that the client has, in APIs that
    number events. `tokens`: number of tokens received; a part without token ids counts as one token.
    """

    lacks_usage = False

    def __init__(self, *, continuable: bool, begun: list[int] | None) -> None:
        self.continuable = continuable
        self.done = self.finished = False
        self.usage: dict[str, Any] | None = None
        self.token_ids = list(begun or ())
        self.sent_events = self.tokens = 0
        self._broken: UpstreamError | None = None
        self._resumed_at = len(self.token_ids)

    @property
    def progressed(self) -> bool:
        """True if tokens have come since the last `resume`."""
        return len(self.token_ids) > self._resumed_at

    @property
    @abstractmethod
    def error_event(self) -> bytes:
        """The error event of the last replica; empty if it sent none."""

    def note_resumed(self) -> None:
        """Note that another replica continues the answer."""
        self._resumed_at = len(self.token_ids)

    @abstractmethod
    def fits(self, head: ResponseHead) -> bool:
        """Return True for a response that continues this answer."""

    @abstractmethod
    def resume(self) -> list[int]:
        """Drop incomplete data. Returns the token ids after which the next replica has to continue."""

    @abstractmethod
    def push(self, piece: bytes) -> bytes:
        """The bytes for the client. To be followed by `check`."""

    @abstractmethod
    def finish(self) -> bytes:
        """The bytes for the client at the end of the stream."""

    @abstractmethod
    def check(self) -> None:
        """Raise UpstreamError for a fault in the bytes of the last `push`."""

    def check_complete(self) -> None:
        """Raise UpstreamError if the stream ended without its end mark."""
        if self.continuable and not self.done:
            raise UpstreamError("it ended the stream without its end mark", code="closed-in-response")


class StreamedAnswer(ResumableAnswer):
    """The chunks of one completion, possibly from several replicas.

    `continuable`: the replica sends token ids, so that another can continue; False after any other chunk. `keeps_ids`:
    the client asked for token ids. `keeps_usage`: the client asked for the chunk with the usage. `model`: the name in
    every chunk; None for the upstream's.
    """

    error_event = b""

    def __init__(
        self,
        *,
        continuable: bool,
        keeps_ids: bool = False,
        keeps_usage: bool = True,
        model: str | None = None,
        begun: list[int] | None = None,
    ) -> None:
        super().__init__(continuable=continuable, begun=begun)
        self._keeps_usage, self._model = keeps_usage, model
        self._strips_ids, self._keeps_ids = continuable and not keeps_ids, keeps_ids
        self._usage_passed = False  # the chunk with only the usage was passed on
        self._splitter = EventSplitter()
        self._head: dict[str, Any] | None = None
        self._preamble = 0  # chunks without tokens that came first: the role, the echo of the prompt
        self._skipped = 0  # leading chunks that the current replica has repeated

    @property
    def lacks_usage(self) -> bool:  # type: ignore[override]
        """True if the client still expects the chunk with the final usage; earlier chunks have the usage so far."""
        return self._keeps_usage and not self._usage_passed

    def resume(self) -> list[int]:
        """Drop an incomplete event. Returns the token ids after which the next replica has to continue.

        If the last token was already passed on, it is left out, so that the new replica samples it again and sends a
        finish reason.
        """
        self._splitter, self._broken = EventSplitter(), None
        ids = self.token_ids[:-1] if self.finished else self.token_ids
        self._skipped = 0 if ids else self._preamble
        self.note_resumed()
        return ids

    def fits(self, head: ResponseHead) -> bool:
        """Return True for a response that continues this answer."""
        return head.status == 200 and head.is_event_stream

    def push(self, piece: bytes) -> bytes:
        """The bytes for the client. To be followed by `check`."""
        shown = []
        for event in self._splitter.push(piece):
            shown.append(self._pass_event(event))
            if self._broken is not None:
                break
        return b"".join(shown)

    def finish(self) -> bytes:
        """The bytes for the client at the end of the stream: an event without its blank line.

        If another replica is to continue, only whole events count: this replica may have been cut off within an event.
        """
        rest = self._splitter.take_rest()
        if self.continuable and not _is_whole(rest):
            return b""
        return self._pass_event(rest) if rest else b""

    def check(self) -> None:
        """Raise UpstreamError for an event that is too long, and for an error event if another replica can continue."""
        if self._broken is not None:
            raise self._broken
        if self._splitter.is_over_limit:
            raise UpstreamError(f"it sent an event of more than {EVENT_BYTES} bytes", code="event-too-large")

    def _pass_event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event
        if data == DONE:
            self.done = True
            return event
        try:
            chunk = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            self._give_up()
            return event
        if "error" in chunk and self.continuable:
            self.error_event = event
            died = error_code(chunk) == ENGINE_RESTARTS
            self._broken = UpstreamError(f"it reports: {_message(chunk)}", code="upstream-error", died=died)
            return b""
        if not self._keep(chunk):
            return b""
        self._unify_head(chunk)
        return b"".join(b"data: %b\n\n" % msgspec.json.encode(part) for part in self._parts(chunk))

    def _parts(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """A chunk as the client gets it.

        A replica that sends ids joins a chat's last text and its finish reason in a chunk; the client gets two.
        """
        match chunk.get("choices"):
            case [{"delta": dict() as delta, "finish_reason": str()} as choice] if self._strips_ids:
                pass
            case _:
                return [chunk]
        if not delta and not choice.get("logprobs"):
            return [chunk]
        text = {**choice, "finish_reason": None, **({"stop_reason": None} if "stop_reason" in choice else {})}
        end = {**choice, "delta": {}, **({"logprobs": None} if "logprobs" in choice else {})}
        return [{**chunk, "choices": [one]} for one in (text, end)]

    def _keep(self, chunk: dict[str, Any]) -> bool:
        """Read a chunk and take out what the client did not ask for. Returns True if something is left."""
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if not choices:
            return self._keep_usage(usage)
        listed = choices if isinstance(choices, list) else []
        rows = [choice for choice in listed if isinstance(choice, dict)]
        # Until the last chunk, the usage counts the answer so far.
        if isinstance(usage, dict) and any(row.get("finish_reason") for row in rows):
            self.usage = usage
        if not self.continuable:
            self.tokens += 1
        ids = rows[0].get("token_ids") if rows else None
        if self._strips_ids:
            for row in rows:
                row.pop("token_ids", None)
        return not rows or not self.continuable or self._keep_choice(rows[0], ids)

    def _keep_usage(self, usage: Any) -> bool:
        """Read a chunk without choices. Returns True if the client gets it."""
        if not isinstance(usage, dict):
            return True
        self.usage = usage
        self._usage_passed |= self._keeps_usage
        return self._keeps_usage

    def _keep_choice(self, choice: dict[str, Any], ids: Any) -> bool:
        """Read a choice of an answer that can be continued. Returns True if the client gets it."""
        if self.finished:  # another replica repeats the finish reason
            return False
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict) or not (ids is None or is_id_list(ids)):
            self._give_up()
            return True
        has_text, finished = _says_something(choice, delta), bool(choice.get("finish_reason"))
        if not ids and not finished:
            self.continuable = ids is not None or not has_text  # else this server does not send token ids
            return self._keep_preamble()
        self._add_ids(ids or [])
        self.finished = finished
        return has_text or finished or bool(choice.get("logprobs")) or self._keeps_ids

    def _keep_preamble(self) -> bool:
        """Count a chunk before the first token. Returns True unless another replica already sent it to the client."""
        if self._skipped:
            self._skipped -= 1
            return False
        self._preamble += 1
        return True

    def _add_ids(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.tokens += len(ids)
        if len(self.token_ids) > MAX_HELD_IDS:
            self._give_up()

    def _give_up(self) -> None:
        """Drop the token ids: from now on no other replica can continue."""
        self.continuable = False
        self.token_ids = []

    def _unify_head(self, chunk: dict[str, Any]) -> None:
        """Give every chunk the id, time and model of the first chunk."""
        if self._head is None:
            self._head = {name: chunk[name] for name in HEAD_FIELDS if name in chunk}
            if self._model is not None:
                self._head["model"] = self._model
        chunk.update(self._head)


def _says_something(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> bool:
    """Return True if a choice has text, or its delta anything but a role."""
    return bool(choice.get("text")) or any(value for name, value in delta.items() if name != "role")


class WholeAnswer:
    """A response that is one JSON object. Its usage is read, and its model may be renamed.

    If it is too long, its bytes are passed on unread. `api`: the API, None for OpenAI's completions.
    """

    def __init__(self, model: str | None, api: StreamApi | None = None) -> None:
        self.usage: dict[str, Any] | None = None
        self._model, self._api = model, api
        self._pieces: list[bytes] = []
        self._size = 0

    def push(self, piece: bytes) -> bytes:
        """The bytes for the client."""
        self._pieces.append(piece)
        self._size += len(piece)
        return self._flush() if self._size > WHOLE_BYTES else b""

    def finish(self) -> bytes:
        """The bytes for the client at the end of the response."""
        body = self._flush()
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body
        if not isinstance(content, dict):
            return body
        self.usage = self._usage_of(content)
        if self._model is None or "model" not in content:
            return body
        content["model"] = self._model
        return msgspec.json.encode(content)

    def _usage_of(self, content: dict[str, Any]) -> dict[str, Any] | None:
        if self._api is not None:
            usage: dict[str, Any] = {}
            self._api.read_usage(content, usage)
            return usage or None
        usage_fields = content.get("usage")
        if usage_fields is None and "prompt_eval_count" in content:  # of Ollama's embeddings
            usage_fields = {"prompt_tokens": content["prompt_eval_count"]}
        return usage_fields if isinstance(usage_fields, dict) else None

    def _flush(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body


def _is_whole(event: bytes) -> bool:
    """Return True for an event whose data is an object or the end mark."""
    data = event_data(event)
    if not data or data == DONE:
        return data == DONE
    try:
        return isinstance(msgspec.json.decode(data), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _message(chunk: dict[str, Any]) -> str:
    error = chunk["error"]
    return str(error.get("message") if isinstance(error, dict) else error)[:200]
