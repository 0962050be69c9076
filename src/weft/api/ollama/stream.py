"""Ollama's streams: one JSON object per line."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.http.errors import error_frame
from weft.http.sse import StreamFormat

PATH = "/api/"


def encode_line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def encode_error_line(error: Exception) -> bytes:
    return encode_line(error_frame(error, PATH))


# Clients parse every line, so that none may be empty.
NDJSON = StreamFormat("application/x-ndjson", encode_error_line, b"")
