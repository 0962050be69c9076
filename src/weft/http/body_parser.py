"""A parser that begins in the body of a request, for requests that ask for another protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httptools

# Header fields that say where the body of a request ends.
FRAMING = (b"content-length", b"transfer-encoding")
CALLBACKS = ("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete")


def framing_fields(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The header fields of a request by which its body ends; [] if it has none."""
    return [(name, value) for name, value in headers if name in FRAMING and value.strip(b"0")]


def parser_in_body(connection: Any, framing: list[tuple[bytes, bytes]]) -> httptools.HttpRequestParser:
    """A parser that calls the methods of `connection` from the body of its last request on.

    httptools assumes that a request with `Upgrade` ends with its head, whatever its length, and reads its body as the
    next request. Here the head is parsed again without that field, and its callbacks are ignored. Raises
    HttpParserError.
    """
    in_body = False

    def told(name: str) -> Callable[..., None]:
        def tell(*given: Any) -> None:
            if in_body:
                getattr(connection, name)(*given)

        return tell

    parser = httptools.HttpRequestParser(SimpleNamespace(**{name: told(name) for name in CALLBACKS}))
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in framing)
    parser.feed_data(b"POST / HTTP/1.1\r\nHost: weft\r\n" + fields + b"\r\n")
    in_body = True
    return parser
