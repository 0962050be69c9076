"""StreamApi: an API whose answers have no room for token ids, such as Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from weft.fleet.gateway.events import BLANK_LINE, event_data
from weft.fleet.gateway.fingerprint import RoutedFields

LINE = re.compile(rb"\n")
MARK = b": weft "
LINE_MARK = b'{"weft":'


class ReceivedMark(msgspec.Struct):
    """Weft's mark after each part of a stream: the part's tokens, and whether it was the last part."""

    token_ids: list[int] = []
    last: bool = False


class LineMark(msgspec.Struct):
    weft: ReceivedMark


MARKS, LINE_MARKS = msgspec.json.Decoder(ReceivedMark), msgspec.json.Decoder(LineMark)

Values = Mapping[str, Any]
Usage = dict[str, Any]


class StreamApi(NamedTuple):
    """An API by its paths.

    `lines`: a stream is lines of JSON, not events. `streams_unasked`: it streams unless `stream` is false. `read_usage`
    adds to a usage, with OpenAI's names, the figures of an answer or a part of a stream. `name_model` renames the model
    of an answer or a part. `read_limit`: the token limit of a request, if it has one.
    """

    lines: bool
    streams_unasked: bool
    read_usage: Callable[[Values, Usage], None]
    name_model: Callable[[dict[str, Any], str], None]
    read_limit: Callable[[RoutedFields], Any]

    @property
    def part_end(self) -> re.Pattern[bytes]:
        """The end of each part of a stream."""
        return LINE if self.lines else BLANK_LINE

    def read_mark(self, part: bytes) -> ReceivedMark | None:
        """The mark, if a part is a mark; else None."""
        if not part.startswith(LINE_MARK if self.lines else MARK):
            return None
        try:
            return LINE_MARKS.decode(part).weft if self.lines else MARKS.decode(part[len(MARK) :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def data(self, part: bytes) -> bytes:
        """The JSON of a part; empty for a comment."""
        if self.lines:
            return part.strip()
        if part.startswith(b"event:"):
            part = part.partition(b"\n")[2]
        return event_data(part) or b""

    def is_error(self, part: bytes) -> bool:
        """Return True for a part with the error that broke a stream."""
        if self.lines:
            return part.startswith(b'{"error":')
        return part.startswith((b"event: error\n", b'data: {"error":'))


def _messages_usage(values: Values, usage: Usage) -> None:
    """/v1/messages: whole answers, `message_start` with the prompt and `message_delta` with the answer."""
    message = values.get("message")
    reported = (message if isinstance(message, dict) else values).get("usage")
    if not isinstance(reported, dict):
        return
    if type(reported.get("input_tokens")) is int:
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        usage["prompt_tokens"] = sum(reported[name] for name in names if type(reported.get(name)) is int)
    if not isinstance(message, dict):  # the first event counts no answer yet
        usage["completion_tokens"] = reported.get("output_tokens")


def _responses_usage(values: Values, usage: Usage) -> None:
    """/v1/responses: whole answers, and the last event."""
    response = values.get("response")
    reported = (response if isinstance(response, dict) else values).get("usage")
    if isinstance(reported, dict):
        usage["prompt_tokens"], usage["completion_tokens"] = reported.get("input_tokens"), reported.get("output_tokens")


def _ollama_usage(values: Values, usage: Usage) -> None:
    """Whole answers, and the last line."""
    if "eval_count" in values or "prompt_eval_count" in values or values.get("done_reason") in ("load", "unload"):
        # Ollama omits the count of a cached prompt.
        usage["prompt_tokens"] = values.get("prompt_eval_count", 0)
        usage["completion_tokens"] = values.get("eval_count", 0)


def _rename(values: dict[str, Any], name: str) -> None:
    """Rename the model of an answer, or of the answer that an event carries."""
    for holder in (values, values.get("message"), values.get("response")):
        if isinstance(holder, dict) and "model" in holder:
            holder["model"] = name


def _num_predict(fields: RoutedFields) -> Any:
    try:
        options = msgspec.json.decode(fields.options or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    limit = options.get("num_predict") if isinstance(options, dict) else None
    return limit if type(limit) is int and limit > 0 else None


MESSAGES = StreamApi(False, False, _messages_usage, _rename, lambda fields: fields.max_tokens)
RESPONSES = StreamApi(False, False, _responses_usage, _rename, lambda fields: fields.max_output_tokens)
OLLAMA = StreamApi(True, True, _ollama_usage, _rename, _num_predict)
APIS: Mapping[str, StreamApi] = {
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/api/chat": OLLAMA,
    "/api/generate": OLLAMA,
}
