"""SimulatedRequest: the lengths of one request, and the part of its prompt that it shares with others."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple


class SimulatedRequest(NamedTuple):
    """One request of a simulated load; lengths are in tokens.

    `shared`: (content id, tokens) of the pieces that the prompt begins with. The tokens after them, and the output,
    have the content `own`. Two prompts have equal tokens where their contents are equal.
    """

    input_len: int
    output_len: int
    own: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    def prompt(self) -> list[int]:
        """Token ids of the prompt: each token is the id of its content."""
        ids: list[int] = []
        for content, tokens in self.shared:
            ids += [content] * min(tokens, self.input_len - len(ids))
        return ids + [self.own] * (self.input_len - len(ids))


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
