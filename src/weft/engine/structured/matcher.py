"""GuidedMatcher: the place of one answer in its grammar, by llguidance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from weft.engine.structured.places import first_line
from weft.engine.structured.schema_state import SchemaState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GuidedMatcher:
    """The Matcher of one answer.

    `grammar` is a number of its compiled grammar. `state`, if there is one, follows the answer in the schema that is
    the grammar.
    """

    def __init__(self, inner: LLMatcher, vocabulary: LLTokenizer, grammar: int, state: SchemaState | None) -> None:
        self.inner = inner
        self.error: str | None = None
        self._vocabulary, self._grammar, self._state = vocabulary, grammar, state

    @property
    def ended(self) -> bool:
        return self.inner.is_stopped() and self.error is None

    def accept(self, token: int) -> None:
        if not self.inner.consume_token(token) or self.inner.is_error():
            self.note_error()
        elif self._state:
            self._state.advance(self._vocabulary.decode_bytes([token]))

    def count_valid(self, tokens: Sequence[int]) -> int:
        return self.inner.validate_tokens(list(tokens))

    def note_error(self) -> None:
        """Keep the reason that the library gives for not going on."""
        self.error = first_line(self.inner.get_error())

    def state_key(self) -> Hashable | None:
        """A key that every answer has of which the same tokens may follow here; None if the state has no key."""
        key = self._state.key() if self._state else None
        return None if key is None else (self._grammar, key)
