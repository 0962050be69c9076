"""Grammars of constrained answers, as the core sees them: matchers that say which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

PARAM = "structured_outputs"  # field of a request to which its grammar belongs
FAILED = "grammar-failed"  # code of a grammar that was compiled and cannot go on


class Matcher(Protocol):
    """The place of one answer in its grammar."""

    @property
    def ended(self) -> bool:
        """True if the answer is complete and nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """The reason that the grammar cannot go on, such as a limit on its size; None while it can."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        ...

    def count_valid(self, tokens: Sequence[int]) -> int:
        """Number of `tokens`, from the first, that may follow each other here."""
        ...


class Grammars(Protocol):
    """Compiles grammars in threads of its own."""

    def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
        """A matcher of `grammar`, advanced by the tokens that are answered already. The future raises RequestError."""
        ...

    def masks(self, rows: Sequence[tuple[Matcher, Sequence[int]]]) -> list[bytes]:
        """For each matcher and the valid draft tokens after it: the masks of its 1 + len(drafts) tokens, in a row.

        The masks have the form of `StepPlan.masks`. The matchers do not advance.
        """
        ...
