"""StreamState and AnswerIds: a stream that another server may continue, and ids that are equal at every server."""

from __future__ import annotations

import secrets
import string
from collections import Counter
from hashlib import blake2b

import msgspec

from weft.errors import RequestError

LETTERS = string.ascii_letters + string.digits
ID_CHARACTERS = 128


class StreamState(msgspec.Struct, kw_only=True):
    """The part of a stream that its client has received.

    `id`: any text; ids within the stream are derived from it, equal at every server. `created`: its time in seconds
    since 1970. `events`: number of events that the client has.
    """

    id: str
    created: int
    events: int = 0


def check_state(state: StreamState | None) -> None:
    """Raise RequestError for a state that no stream can have."""
    if state is None:
        return
    if not 0 < len(state.id) <= ID_CHARACTERS or state.events < 0 or not 0 <= state.created < 2**40:
        raise RequestError(
            f"stream_state must have an id of 1 to {ID_CHARACTERS} characters, and whole numbers from 0 on",
            param="stream_state",
            code="invalid-stream-state",
        )


class AnswerIds:
    """Makes the ids of an answer and of its parts, at random or from a stream's state.

    The n-th id of a kind is the same at every server.
    """

    def __init__(self, state: StreamState | None = None) -> None:
        self._seed = "" if state is None else state.id  # drawn with the first id if it is empty
        self._made: Counter[str] = Counter()

    def hexadecimal(self, prefix: str) -> str:
        """PREFIX_ and 32 hexadecimal digits."""
        return f"{prefix}_{self._draw(prefix)[:16].hex()}"

    def letters(self, count: int) -> str:
        """Up to 32 letters and digits."""
        return "".join(LETTERS[byte % len(LETTERS)] for byte in self._draw("")[:count])

    def _draw(self, kind: str) -> bytes:
        self._made[kind] += 1
        self._seed = self._seed or secrets.token_hex(16)
        return blake2b(f"{kind} {self._made[kind]} {self._seed}".encode(errors="replace"), digest_size=32).digest()
