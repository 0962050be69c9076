"""Ask: one request of a load, and what its prompt shares with others."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple


class SimulatedRequest(NamedTuple):
    """`shared` are the pieces that the prompt begins with: content and tokens of each. What follows them, and the
    answer, is of the content `own`. Two prompts are alike as far as their contents are."""

    input_len: int
    output_len: int
    own: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    def prompt(self) -> list[int]:
        """Token ids that differ where contents do."""
        ids: list[int] = []
        for content, tokens in self.shared:
            ids += [content] * min(tokens, self.input_len - len(ids))
        return ids + [self.own] * (self.input_len - len(ids))


class ContentIds:
    """Numbers for contents, none twice."""

    def __init__(self) -> None:
        self._next = count(1)
        self._known: dict[tuple[str, str], int] = {}

    def new(self) -> int:
        """One that nobody has."""
        return next(self._next)

    def id(self, kind: str, name: object) -> int:
        """Always the same for one name of a kind."""
        key = kind, str(name)
        if key not in self._known:
            self._known[key] = self.new()
        return self._known[key]
