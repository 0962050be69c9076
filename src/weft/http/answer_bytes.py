"""AnswerBytes: a bound on the memory of long answers."""

from __future__ import annotations

from weft.http.errors import HttpError

MAX_ANSWER_BYTES = 512 * 2**20


class AnswerBytes:
    """Bytes of long answers under way on one server, from their requests until they are sent: at most `most`."""

    def __init__(self, most: int = MAX_ANSWER_BYTES) -> None:
        self._most, self.taken = most, 0

    def take(self, size: int) -> None:
        """Reserve bytes. An answer that is larger than the bound is sent alone. Raises HttpError 429."""
        if self.taken and self.taken + size > self._most:
            raise HttpError(
                429,
                f"the answer is of about {size:,} bytes, and those under way take {self.taken:,} of {self._most:,}; "
                "try again later, or with fewer inputs",
                code="too-many-answer-bytes",
                retry_after_s=1,
            )
        self.taken += size

    def give_back(self, size: int) -> None:
        """Release reserved bytes."""
        self.taken -= size
