"""Framing: typed messages over one stream socket, each as a 4-byte length and MessagePack."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from weft.errors import WeftError

M = TypeVar("M")

LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20  # bytes; the largest expected: prompt logprobs, 20 per token, of 500,000 tokens
RECEIVE_BYTES = 64 << 10  # read from the socket at once

_encoder = msgspec.msgpack.Encoder()
# msgspec may crash if two threads are the first to build decoders of the same types.
_building = threading.Lock()


class FrameError(WeftError):
    """A frame that is over the limit, or that holds no message known to this process."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return one whole frame, ready for any number of sockets. Raises FrameError if it is over the limit."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(message, buffer, LENGTH.size)
    size = check_size(len(buffer) - LENGTH.size)
    LENGTH.pack_into(buffer, 0, size)
    return bytes(buffer)


def check_size(size: int, *, most: int | None = None) -> int:
    """Return `size`, in bytes. Raises FrameError if no frame, or none here, may be that large."""
    limit = MAX_FRAME if most is None else min(most, MAX_FRAME)
    if size > limit:
        raise FrameError(
            f"a message of {size:,} bytes is over the limit of {limit:,} bytes between processes; "
            "ask for fewer logprobs, or send fewer or shorter prompts at once",
            code="message-too-large",
        )
    return size


class FrameDecoder(Generic[M]):
    """Decodes a stream, received in any pieces, into the structs of `messages`, a tagged union.

    A frame that the end of the stream cuts off is dropped: its sender has died. `most` is a lower limit on frames.
    """

    def __init__(self, messages: Any, *, most: int | None = None) -> None:
        self._most = most
        with _building:
            self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that `data` completes. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            stop = LENGTH.size + check_size(*LENGTH.unpack_from(self._buffer), most=self._most)
            if len(self._buffer) < stop:
                return
            body = bytes(self._buffer[LENGTH.size : stop])
            del self._buffer[:stop]
            try:
                yield self._decoder.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise FrameError(
                    f"a message that this process does not know: {error}", code="unknown-message"
                ) from error


class Channel(Generic[M]):
    """One end of a socket pair. It sends any struct; iterating yields what comes in, until the other end is gone.

    One thread may receive while another sends. A limit that the socket has (`settimeout`) raises TimeoutError, and so
    does the end of `deadline_s`, a monotonic time. `most` is a lower limit on frames that come in.
    """

    def __init__(self, end: socket.socket, messages: Any, *, most: int | None = None) -> None:
        self.socket = end
        self.deadline_s: float | None = None
        self._decoder: FrameDecoder[M] = FrameDecoder(messages, most=most)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def offer(self, message: msgspec.Struct, sending: threading.Lock) -> None:
        """Send a short message unless that means to wait: while another thread has the lock, or the buffer is full.

        Without effect if the other end is gone.
        """
        if not sending.acquire(blocking=False):
            return
        try:
            if self._has_room():
                self.send(message)
        except OSError:
            return
        finally:
            sending.release()

    def _has_room(self) -> bool:
        if self.socket.fileno() < 0:
            return False
        room = select.poll()
        room.register(self.socket, select.POLLOUT)
        return bool(room.poll(0))

    def __iter__(self) -> Iterator[M]:
        while data := self._receive():
            yield from self._decoder.feed(data)

    def hang_up(self) -> None:
        """End the stream for both sides. A thread that waits for a message returns. May be called twice."""
        with contextlib.suppress(OSError):  # the other side was first, or the socket is closed already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the file descriptor. To be called only once no iterator is in use."""
        self.socket.close()

    def _receive(self) -> bytes:
        if self.deadline_s is not None:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the message has not come in time")
            self.socket.settimeout(left_s)
        try:
            return self.socket.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            if error.errno is None:  # the socket's own limit
                raise
            return b""  # ETIMEDOUT: the other machine is gone
        except OSError:  # reset: the other side died with our bytes unread
            return b""
