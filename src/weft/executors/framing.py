"""Framing: typed messages over one stream socket, each as a 4-byte length and MessagePack."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from weft.errors import WeftError

M = TypeVar("M")

LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20  # bytes; the largest that is meant: prompt logprobs, 20 per token, of 500,000 tokens

SMALL, LARGE = 64 << 10, 1 << 20  # bytes asked of the socket at once

_encoder = msgspec.msgpack.Encoder()


class FrameError(WeftError):
    """A frame that is over the limit, or holds no message that this end knows."""


def encode(message: msgspec.Struct) -> bytes:
    """One whole frame, ready for as many sockets as need it. Raises FrameError where it is over the limit."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(message, buffer, LENGTH.size)
    size = check_size(len(buffer) - LENGTH.size)
    LENGTH.pack_into(buffer, 0, size)
    return bytes(buffer)


def check_size(size: int) -> int:
    """`size` in bytes, if a frame may be that large."""
    if size > MAX_FRAME:
        raise FrameError(
            f"a message of {size:,} bytes is over the limit of {MAX_FRAME:,} bytes between processes; "
            "ask for fewer logprobs, or send fewer or shorter prompts at once"
        )
    return size


class Decoder(Generic[M]):
    """Turns the body of a frame into one of `messages`, a tagged union of structs."""

    def __init__(self, messages: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(messages)

    def decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise FrameError(f"a message that this process does not know: {error}") from error


class Channel(Generic[M]):
    """One end of a socket pair. Sends any struct; iterating gives what comes in, until the other end is gone.

    One thread may receive and another send. A frame that is cut off by the end of the stream is not given:
    its sender has died.
    """

    def __init__(self, end: socket.socket, messages: Any) -> None:
        self.socket = end
        self._decoder: Decoder[M] = Decoder(messages)
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError where the other end is gone."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def __iter__(self) -> Iterator[M]:
        while self._have(LENGTH.size):
            stop = LENGTH.size + check_size(*LENGTH.unpack_from(self._buffer))
            if not self._have(stop):
                return
            body = bytes(self._buffer[LENGTH.size : stop])
            del self._buffer[:stop]
            yield self._decoder.decode(body)

    def hang_up(self) -> None:
        """End the stream for both sides; a thread that waits in it returns. May be called twice."""
        with contextlib.suppress(OSError):  # the other side was first, or it is closed already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the file descriptor back; only once nobody iterates any more."""
        self.socket.close()

    def _have(self, size: int) -> bool:
        """Wait for `size` bytes in the buffer; False where the stream ends before."""
        while len(self._buffer) < size:
            try:
                more = self.socket.recv(min(max(size - len(self._buffer), SMALL), LARGE))
            except OSError:  # reset: the other side died with our bytes unread
                return False
            if not more:
                return False
            self._buffer += more
        return True
