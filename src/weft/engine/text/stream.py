"""TextStream: the text of one completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING

from weft.engine.text.pieces import Detokenizer
from weft.engine.text.stops import StopAutomaton, StopStrings

if TYPE_CHECKING:
    from weft.engine.core.params import SamplingParams
    from weft.engine.text.tokenizer import Tokenizer


class TextStream:
    """Streamed text of a completion, up to its first stop string.

    The results of `push` and `finish`, concatenated, are `Tokenizer.decode` of prompt and completion without the
    decoded prompt. No part of them is revised later. The cost of a token does not depend on the length of the text.

    `stopped` is the stop string that ended the completion; after it the stream is empty. A stop string counts if it
    ends in the text of a token after the first `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        """`shown`: special tokens that the text has even if `params` skip special tokens."""
        self._text = Detokenizer(
            tokenizer.pieces, skip_special=params.skip_special_tokens, context=prompt_ids, shown=shown
        )
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(StopAutomaton(params.stop), keep=params.include_stop_str_in_output)
        self._early = params.min_tokens  # tokens still to come before stop strings count
        self._armed = False

    def fork(self) -> TextStream:
        """Stream of another choice, with the same state. Prompt and stop strings are not processed again."""
        other = copy(self)
        other._text = self._text.fork()
        other._stops = copy(self._stops)
        return other

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the completion, if any."""
        return self._stops.match if self._stops is not None else None

    def push(self, ids: Sequence[int]) -> str:
        """Text that is final after `ids`: no part of a character, and nothing that may begin a stop string."""
        if self._stops is None:
            return self._decode(ids)
        if self.stopped is not None:
            return ""
        early, late = ids[: self._early], ids[self._early :]
        self._early -= len(early)
        self._armed = self._armed or bool(late)
        text = self._stops.push(self._decode(early), armed=False) if early else ""
        return text + self._stops.push(self._decode(late))

    def finish(self) -> str:
        """Remaining text at the end of the completion: an incomplete character as U+FFFD, and text held back."""
        if self._stops is None:
            return self._text.flush()
        if self.stopped is not None:
            return ""
        return self._stops.push(self._text.flush(), armed=self._armed) + self._stops.flush()

    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            return self._text.push(ids[0])
        return "".join([self._text.push(id) for id in ids])
