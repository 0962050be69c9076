"""The event of an error in a stream of /v1/responses."""

from __future__ import annotations

import msgspec

from weft.api.responses.types import ResponseEvent
from weft.http.errors import describe_error


def error_event(error: Exception) -> ResponseEvent:
    """The event that reports an error."""
    _, body, _ = describe_error(error)
    return ResponseEvent(type="error", code=body.code, message=body.message, param=body.param)


def encode_event(event: ResponseEvent, number: int) -> bytes:
    """An event as bytes; `number`: of events before it."""
    event.sequence_number = number
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), msgspec.json.encode(event))


def encode_error(error: Exception, number: int) -> bytes:
    """The last event of a stream that breaks after `number` events."""
    return encode_event(error_event(error), number)
