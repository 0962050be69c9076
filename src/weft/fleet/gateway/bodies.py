"""BodyPool: the bodies of requests, held in bounded memory until no replica needs them."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from weft.http.errors import HttpError


class BodyPool:
    """Receives bodies of at most `limit` bytes each, and holds at most `total` bytes of them.

    `held`: bytes that are received and not released.
    """

    def __init__(self, limit: int, total: int) -> None:
        self._limit, self._total = limit, total
        self.held = 0

    async def receive(self, announced: int, receive: Receive) -> bytes:
        """Receive a body, which counts as held until `release`. `announced`: its length by its head, or 0.

        Raises HttpError 413 for a body over the limit, 503 if the pool has no room for it, and ClientDisconnect.
        """
        if announced:
            self._check_announced(announced)
        pieces, size, more = [], 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece, more = message.get("body", b""), message.get("more_body", False)
                size += len(piece)
                self.held += len(piece)
                if size > min(self._limit, self._total):
                    raise self._too_long()
                if self.held > self._total:
                    raise self._no_room()
                pieces.append(piece)
            return b"".join(pieces)
        except BaseException:
            self.held -= size
            raise

    def release(self, size: int) -> None:
        """Count `size` bytes as free."""
        self.held -= size

    def _check_announced(self, length: int) -> None:
        """Raise HttpError before the first byte if the body's length is known, and too large."""
        if length > self._limit or length > self._total:
            raise self._too_long()
        if self.held + length > self._total:
            raise self._no_room()

    def _too_long(self) -> HttpError:
        if self._total < self._limit:
            return HttpError(
                413,
                f"the body is longer than the {self._total} bytes for all bodies together; send less, or raise "
                "--max-held-bytes",
                code="body-too-large",
            )
        return HttpError(
            413,
            f"the body is longer than {self._limit} bytes; send less, or raise --max-body-bytes",
            code="body-too-large",
        )

    def _no_room(self) -> HttpError:
        return HttpError(
            503,
            f"the requests that wait hold more than {self._total} bytes; try again later, or raise --max-held-bytes",
            code="overloaded",
            retry_after_s=1,
        )
