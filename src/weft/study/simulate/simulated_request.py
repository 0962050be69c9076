"""SimulatedRequest: the lengths of one request, and the part of its prompt that it shares with others."""

from __future__ import annotations

from array import array
from itertools import count
from typing import NamedTuple

from weft.engine.core.token_ids import TokenIds
from weft.fleet.upstreams.policy import PIECE_TOKENS, Fingerprint


class SimulatedRequest(NamedTuple):
    """One request of a simulated load; lengths are in tokens.

    `shared`: (content id, tokens) of the pieces that the prompt begins with. The tokens after them, and the output,
    have the content `own`. Two prompts have equal tokens where their contents are equal.
    """

    input_len: int
    output_len: int
    own: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    def packed_prompt(self) -> TokenIds:
        """Token ids of the prompt: each token is the id of its content."""
        ids = array("i")
        for content, tokens in self.shared:
            ids += array("i", [content]) * min(tokens, self.input_len - len(ids))
        ids += array("i", [self.own]) * (self.input_len - len(ids))
        return TokenIds(ids.tobytes())

    def prompt(self) -> list[int]:
        """Token ids of the prompt, in a list."""
        return list(self.packed_prompt())

    @property
    def session(self) -> str:
        """The first content that the prompt shares: requests of one conversation have the same; "" for none."""
        return str(self.shared[0][0]) if self.shared else ""

    def fingerprint(self) -> Fingerprint:
        """The fingerprint for a routing policy."""
        ids = self.prompt()
        digests, digest = [], 0
        for end in range(PIECE_TOKENS, self.input_len + 1, PIECE_TOKENS):
            digest = hash((digest, *ids[end - PIECE_TOKENS : end]))
            digests.append(digest)
        return Fingerprint(tuple(digests), self.input_len, self.session)


class ContentIds:
    """Unique ids of prompt contents."""

    def __init__(self) -> None:
        self._next = count(1)
        self._ids: dict[tuple[str, str], int] = {}

    def new(self) -> int:
        """An unused id."""
        return next(self._next)

    def id(self, kind: str, name: object) -> int:
        """The id for a name of a kind; always the same."""
        key = kind, str(name)
        if key not in self._ids:
            self._ids[key] = self.new()
        return self._ids[key]
