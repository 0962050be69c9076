"""GrammarCompiler: compiles grammars in threads of the core, which have been compiled in a sandbox before."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, cast

from weft.engine.core.grammar import PARAM, Matcher
from weft.engine.structured.masks import MaskMaker
from weft.engine.structured.matcher import GuidedMatcher
from weft.engine.structured.places import first_line
from weft.engine.structured.schema_state import Schema, SchemaState, has_keys
from weft.engine.structured.vocabulary import build_vocabulary, list_vocabulary
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import RequestError
from weft.machine.hardware.host import resident_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

THREADS = 2
NICE = 5  # added to their priority's number: the core's loop has steps to plan at the same time
# Compiled grammars are kept. A grammar's size is the memory by which the process grew during its compilation, and at
# least a minimum.
KEPT_BYTES = 256 << 20
MIN_BYTES, BYTES_PER_CHARACTER = 64 << 10, 64
ROW_ITEMS = 5000  # states of a parse that are open at once: about four for each optional property of an object


class Compiled(NamedTuple):
    """A compiled grammar.

    It is a matcher at its beginning, a number that no other has, its schema if that has keys, and about its size.
    """

    base: LLMatcher
    number: int
    schema: Schema | None
    bytes: int


def parser_limits() -> LLParserLimits:
    """The library's limits, wherever a grammar is compiled."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_items_in_row=ROW_ITEMS)


class GrammarCompiler:
    """Compiles grammars for one vocabulary: `load` returns its tokenizer, `vocab` is the number of embedding rows.

    It implements `engine.core.grammar.Grammars`. The vocabulary is prepared for the first grammar, in that one's
    thread: most servers never see one.
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
        return ThreadPoolExecutor(THREADS, thread_name_prefix="weft-grammar", initializer=_yield_to_others)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The vocabulary in the library's form."""
        tokenizer = self._load()
        return build_vocabulary(list_vocabulary(tokenizer, self._vocab, self._eos), tokenizer.encode_literally)

    def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
        return self._threads.submit(self._matcher, grammar, list(answered))

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
        from llguidance import LLMatcher

        with self._lock:
            if (kept := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return kept
            vocabulary = self.vocabulary
        before = resident_bytes()
        base = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        if not base.is_error():
            base.compute_bitmask()  # the library fills its caches with the first mask
        if base.is_error():
            raise RequestError(first_line(base.get_error()), param=PARAM, code="invalid-grammar")
        taken = max(resident_bytes() - before, BYTES_PER_CHARACTER * len(grammar), MIN_BYTES)
        compiled = Compiled(base, next(self._numbers), schema_with_keys(grammar), taken)
        with self._lock:
            self._compiled[grammar] = compiled
            while sum(kept.bytes for kept in self._compiled.values()) > KEPT_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)
        return compiled


def _yield_to_others() -> None:
    """Lower the priority of the calling thread; Linux has one for each."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def schema_with_keys(grammar: str) -> Schema | None:
    """The schema that is all of a grammar, if answers to it have states with keys."""
    parts = json.loads(grammar)["grammars"]
    schema = parts[0].get("json_schema")
    return schema if len(parts) == 1 and isinstance(schema, Mapping) and has_keys(schema) else None
