"""GrammarCompiler: compiles grammars in threads, checks them for the caller's side, and computes masks."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, cast

import numpy as np

from weft.core.grammar import Matcher
from weft.errors import RequestError
from weft.structured.grammar import PARAM
from weft.structured.places import first_line, placed
from weft.structured.vocabulary import build_vocabulary
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

CACHED = 64  # compiled grammars that are kept
THREADS = 2
MASK_THREADS = 4  # that compute masks of several rows; more do not pay, as others need the cores
WORD_BYTES = 4


class UnpreparedError(Exception):
    """The vocabulary is not prepared yet, and this is a thread that must not do it."""


# True in a thread that has other work, such as that of an event loop: the vocabulary is not prepared there.
must_be_quick: ContextVar[bool] = ContextVar("must_be_quick", default=False)


class GuidedMatcher:
    """The Matcher of one answer."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        return self.inner.is_stopped()

    def accept(self, token: int) -> None:
        if not self.inner.consume_token(token):
            self.error = first_line(self.inner.get_error())

    def count_valid(self, tokens: Sequence[int]) -> int:
        return self.inner.validate_tokens(list(tokens))


class GrammarCompiler:
    """Compiles grammars for one vocabulary: `load` returns its tokenizer, `vocab` is the number of embedding rows.

    It implements `core.grammar.Grammars`. The vocabulary is prepared for the first grammar, in that one's thread: most
    servers never see one.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab: int, eos: Sequence[int]) -> None:
        self._load = load
        self._vocab = vocab
        self._eos = eos
        self._lock = Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._mask_bytes = -(-vocab // (8 * WORD_BYTES)) * WORD_BYTES

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="weft-grammar")

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(min(MASK_THREADS, os.cpu_count() or 1))

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The vocabulary in the library's form."""
        tokenizer = self._load()
        return build_vocabulary(tokenizer, self._vocab, sorted({*self._eos, *tokenizer.end_ids}))

    def prepare(self) -> None:
        """Prepare the vocabulary if it is not yet, or wait until another thread has done so."""
        with self._lock:
            self.vocabulary  # noqa: B018  # cached

    def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
        return self._threads.submit(self._matcher, grammar, list(answered))

    def check(self, grammar: str, param: str = PARAM) -> None:
        """Raise RequestError, with the place of the mistake, for a grammar that cannot be compiled.

        Raises UnpreparedError if this has to be quick, and the vocabulary is not prepared.
        """
        try:
            self._base(grammar)
        except RequestError as error:
            raise RequestError(self._with_place(grammar, str(error)), param=param, code=error.code) from None

    def masks(self, rows: Sequence[tuple[Matcher, Sequence[int]]]) -> list[bytes]:
        counts = [1 + len(drafts) for _, drafts in rows]
        words = np.zeros((sum(counts), self._mask_bytes // WORD_BYTES), dtype="<i4")
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        inners = [cast(GuidedMatcher, matcher).inner for matcher, _ in rows]
        plain = [(inner, at) for inner, at, count in zip(inners, starts, counts, strict=True) if count == 1]
        drafted = [
            (inner, at, list(drafts)) for inner, at, (_, drafts) in zip(inners, starts, rows, strict=True) if drafts
        ]
        where = words.ctypes.data, self._mask_bytes, len(words)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for (matcher, _), inner in zip(rows, inners, strict=True):
            if inner.is_error():
                cast(GuidedMatcher, matcher).error = first_line(inner.get_error())
        return [words[at : at + count].tobytes() for at, count in zip(starts, counts, strict=True)]

    def _matcher(self, grammar: str, answered: list[int]) -> Matcher:
        inner = self._base(grammar).deep_copy()
        if answered and not inner.consume_tokens(answered):
            raise RequestError(
                "continue_token_ids do not follow the request's grammar",
                param="continue_token_ids",
                code="continuation-not-possible",
            )
        return GuidedMatcher(inner)

    def _base(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a grammar, to be copied. Its first mask has been computed."""
        from llguidance import LLMatcher, LLParserLimits

        # Before the lock, which the thread that prepares the vocabulary holds.
        if must_be_quick.get() and "vocabulary" not in vars(self):
            raise UnpreparedError
        with self._lock:
            if (base := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return base
            vocabulary = self.vocabulary
        limits = LLParserLimits(verbose_errors=False)
        base = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not base.is_error():
            base.compute_bitmask()  # the library fills its caches with the first mask
        if base.is_error():
            raise RequestError(first_line(base.get_error()), param=PARAM, code="invalid-grammar")
        with self._lock:
            self._compiled[grammar] = base
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return base

    def _with_place(self, grammar: str, problem: str) -> str:
        """The problem of a grammar with the innermost part of its schema that has it too."""
        parts = json.loads(grammar)["grammars"]
        schema = next((part["json_schema"] for part in parts if "json_schema" in part), None)
        if not isinstance(schema, Mapping):
            return f"the grammar cannot be compiled: {problem}"
        return placed(schema, problem)
