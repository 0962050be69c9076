"""GrammarCompiler: compiles grammars in threads, and checks them for the caller's side."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cached_property
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, cast

from weft.core.grammar import Matcher
from weft.errors import RequestError
from weft.structured.grammar import PARAM
from weft.structured.masks import MaskMaker
from weft.structured.matcher import GuidedMatcher
from weft.structured.places import first_line, placed
from weft.structured.schema_state import Schema, SchemaState, has_keys
from weft.structured.vocabulary import build_vocabulary
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED = 64  # compiled grammars that are kept
THREADS = 2


class UnpreparedError(Exception):
    """The vocabulary is not prepared yet, and this is a thread that must not do it."""


# True in a thread that has other work, such as that of an event loop: the vocabulary is not prepared there.
must_be_quick: ContextVar[bool] = ContextVar("must_be_quick", default=False)


class Compiled(NamedTuple):
    """A compiled grammar: a matcher at its beginning, a number that no other has, and its schema if that has keys."""

    base: LLMatcher
    number: int
    schema: Schema | None


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
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._numbers = count()
        self._mask_maker = MaskMaker(vocab)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="weft-grammar")

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
            self._compile(grammar)
        except RequestError as error:
            raise RequestError(self._with_place(grammar, str(error)), param=param, code=error.code) from None

    def masks(self, rows: Sequence[tuple[Matcher, Sequence[int]]]) -> list[bytes]:
        return self._mask_maker.masks(cast(Sequence[tuple[GuidedMatcher, Sequence[int]]], rows))

    def _matcher(self, grammar: str, answered: list[int]) -> Matcher:
        compiled = self._compile(grammar)
        inner = compiled.base.deep_copy()
        if answered and not inner.consume_tokens(answered):
            raise RequestError(
                "continue_token_ids do not follow the request's grammar",
                param="continue_token_ids",
                code="continuation-not-possible",
            )
        state = None if compiled.schema is None else SchemaState(compiled.schema)
        if state:
            state.advance(self.vocabulary.decode_bytes(answered))
        return GuidedMatcher(inner, self.vocabulary, compiled.number, state)

    def _compile(self, grammar: str) -> Compiled:
        """Compile a grammar, unless it is kept. The first mask of its matcher, which is to be copied, is computed."""
        from llguidance import LLMatcher, LLParserLimits

        # Before the lock, which the thread that prepares the vocabulary holds.
        if must_be_quick.get() and "vocabulary" not in vars(self):
            raise UnpreparedError
        with self._lock:
            if (kept := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return kept
            vocabulary = self.vocabulary
        limits = LLParserLimits(verbose_errors=False)
        base = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not base.is_error():
            base.compute_bitmask()  # the library fills its caches with the first mask
        if base.is_error():
            raise RequestError(first_line(base.get_error()), param=PARAM, code="invalid-grammar")
        compiled = Compiled(base, next(self._numbers), schema_with_keys(grammar))
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _with_place(self, grammar: str, problem: str) -> str:
        """The problem of a grammar with the innermost part of its schema that has it too."""
        parts = json.loads(grammar)["grammars"]
        schema = next((part["json_schema"] for part in parts if "json_schema" in part), None)
        if not isinstance(schema, Mapping):
            return f"the grammar cannot be compiled: {problem}"
        return placed(schema, problem)


def schema_with_keys(grammar: str) -> Schema | None:
    """The schema that is all of a grammar, if answers to it have states with keys."""
    parts = json.loads(grammar)["grammars"]
    schema = parts[0].get("json_schema")
    return schema if len(parts) == 1 and isinstance(schema, Mapping) and has_keys(schema) else None
