"""Uploaded files: the body of multipart/form-data, received to the disk, and its parts."""

from __future__ import annotations

import mmap
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from email.message import Message
from email.parser import BytesParser
from typing import BinaryIO

from starlette.requests import Request

from weft.errors import RequestError
from weft.http.admission import STORED
from weft.http.errors import HttpError

MAX_FILE_BYTES = 200 * 2**20  # bytes of one file, as in OpenAI's API
FORM_BYTES = 2**16  # bytes of the other fields and the parts' heads
RESERVED_BYTES = 2**20  # bytes that are reserved at once for an upload of unknown length
HEAD_BYTES = 2**13
NAME_LENGTH = 255  # characters of a file's name, as file systems have at most
MAX_PARTS = 32
WINDOW = 2**18  # bytes that are searched at once: mmap.find holds Python's lock, here for about 1 ms


def boundary_of(request: Request) -> bytes:
    """The line between the parts of a request's body. Raises RequestError for a body of another type."""
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        raise RequestError("send multipart/form-data with the fields file and purpose", code="not-form-data")
    return b"--" + boundary.encode()


class UploadRoom:
    """Bytes of the uploads that are being received, by owner: they count like the files that they become."""

    def __init__(self) -> None:
        self._sizes: Counter[str] = Counter()

    def add(self, owner: str, size: int) -> tuple[int, int]:
        """Add bytes of an owner, or subtract them if negative. Return this owner's bytes, and all others'."""
        self._sizes[owner] += size
        own = self._sizes[owner]
        if not own:
            del self._sizes[owner]
        return own, self._sizes.total() - own


# Raises HttpError unless this number of bytes more is free.
Reserve = Callable[[int], Awaitable[None]]


async def receive_body(request: Request, file: BinaryIO, reserve: Reserve) -> None:
    """Write a request's body to a file. Raises HttpError 413 for a long body, and the errors of `reserve`."""
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isdecimal() else 0
    size, reserved = 0, RESERVED_BYTES  # a small upload needs no reservation before it is a file
    _check_length(announced)
    stored: Callable[[int], None] | None = request.scope.get(STORED)
    async for piece in request.stream():
        size += len(piece)
        _check_length(size)
        if size > reserved:
            step = max(announced, RESERVED_BYTES)
            await reserve(step)
            reserved += step
        file.write(piece)
        if stored is not None:
            stored(len(piece))
    file.flush()


def _check_length(size: int) -> None:
    if size > MAX_FILE_BYTES + FORM_BYTES:
        raise HttpError(413, f"the file is longer than {MAX_FILE_BYTES:,} bytes; send several", code="file-too-large")


class Form:
    """The fields of a body, and the place of the uploaded file in it."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.start = self.end = -1  # of the file's bytes


def read_form(file: BinaryIO, boundary: bytes) -> Form:
    """Find the parts of a body in a file. Raises RequestError for a body that is no form."""
    form = Form()
    if not file.tell():
        raise _broken("it is empty")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, end in _parts(data, boundary):
            head_end = data.find(b"\r\n\r\n", start, min(end, start + HEAD_BYTES))
            if head_end < 0:
                raise _broken("a part has no head")
            head = BytesParser().parsebytes(data[start : head_end + 4], headersonly=True)
            name = head.get_param("name", header="content-disposition")
            filename = head.get_filename()
            if filename is not None and len(filename) > NAME_LENGTH:
                raise RequestError(
                    f"the file's name has {len(filename):,} characters; at most {NAME_LENGTH} are kept",
                    param="file",
                    code="filename-too-long",
                )
            if name == "file" and filename is not None:
                form.filename, form.start, form.end = filename, head_end + 4, end
            elif isinstance(name, str) and end - head_end < FORM_BYTES:
                form.fields[name] = data[head_end + 4 : end].decode(errors="replace")
    return form


def _parts(data: mmap.mmap, boundary: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each part, its head included."""
    at = _find(data, boundary, 0)
    for _ in range(MAX_PARTS):
        if at < 0:
            break
        start = at + len(boundary)
        if data[start : start + 2] == b"--":
            return
        if not re.match(rb"[ \t]*\r\n", data[start : start + 80]):
            break
        start = _find(data, b"\r\n", start) + 2
        at = _find(data, b"\r\n" + boundary, start - 2)
        if at < 0:
            break
        yield start, at
        at += 2
    raise _broken("it ends in the middle, or has too many parts")


def _find(data: mmap.mmap, sought: bytes, start: int) -> int:
    """Like `data.find`, in windows, between which other threads get Python's lock."""
    for at in range(start, len(data), WINDOW):
        place = data.find(sought, at, at + WINDOW + len(sought) - 1)
        if place >= 0:
            return place
        time.sleep(0)
    return -1


def _broken(reason: str) -> RequestError:
    return RequestError(f"the body is not multipart/form-data: {reason}", code="broken-form-data")
