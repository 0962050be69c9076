"""The examination of grammars in a child process: each grammar is compiled there before the engine compiles it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.engine.structured.compiler import parser_limits
from weft.engine.structured.places import first_line, placed, problem_of
from weft.engine.structured.vocabulary import Vocabulary, build_vocabulary
from weft.errors import RequestError
from weft.machine.hardware.host import resident_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 64 << 20  # memory that a compiled grammar may take; the engine keeps several
WALK = 16  # tokens of an answer that are tried: some limits of the library are met by the first tokens only
# Bytes with which structures begin, tried first.
BEGINNINGS = b'{["' + b"<(:, \n" + b"0aA1tfn-}]"


class GrammarQuestion(msgspec.Struct, frozen=True):
    """A question about a text: if a grammar can be compiled, and where its mistake is, or why a schema cannot be."""

    text: str
    whole: bool = True  # a grammar in the library's form, with all its parts; else one Lark or JSON schema alone
    lark: bool = False


def encode_questions(questions: Sequence[GrammarQuestion]) -> bytes:
    """Return questions as one job."""
    return msgspec.msgpack.encode(questions)


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the handler of questions about grammars for a vocabulary. It answers each by a text: "" or the problem.

    A whole grammar that cannot be used is a RequestError.
    """
    tokenizer = build_vocabulary(msgspec.msgpack.decode(setup, type=Vocabulary))

    def examine(job: bytes) -> bytes:
        questions = msgspec.msgpack.decode(job, type=list[GrammarQuestion])
        return msgspec.msgpack.encode([answer(question) for question in questions])

    def answer(question: GrammarQuestion) -> str:
        if not question.whole:
            return _problem(question)
        check_grammar(tokenizer, question.text)
        return ""

    return examine


def check_grammar(tokenizer: LLTokenizer, grammar: str) -> None:
    """Raise RequestError, with the place of the mistake, for a grammar that cannot be compiled or used."""
    from llguidance import LLMatcher

    before = resident_bytes()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        _walk(tokenizer, matcher)
    if matcher.is_error():
        raise _invalid(_with_place(grammar, first_line(matcher.get_error())))
    taken = resident_bytes() - before
    if taken > MAX_BYTES:
        raise RequestError(
            f"the grammar takes {taken >> 20} MiB once compiled; the limit is {MAX_BYTES >> 20} MiB; make it smaller",
            code="grammar-too-large",
        )


def _walk(tokenizer: LLTokenizer, matcher: LLMatcher) -> None:
    """Follow the grammar for some tokens. A matcher that cannot go on has an error after it."""
    spelled = [tokenizer.greedy_tokenize(chr(byte)) for byte in BEGINNINGS]
    singles = [ids[0] for ids in spelled if len(ids) == 1]
    for _ in range(WALK):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        token = next((id for id in singles if mask[id >> 3] >> (id & 7) & 1), None)
        if token is None:
            token = _first_allowed(mask, tokenizer.eos_tokens)
        if token is None or not matcher.consume_token(token):
            return


def _first_allowed(mask: bytes, ends: Sequence[int]) -> int | None:
    for at, byte in enumerate(mask):
        if byte:
            for bit in range(8):
                if byte >> bit & 1 and 8 * at + bit not in ends:
                    return 8 * at + bit
    return None


def _with_place(grammar: str, problem: str) -> str:
    """The problem of a grammar with the innermost part of its schema that has it too."""
    parts = json.loads(grammar)["grammars"]
    schema = next((part["json_schema"] for part in parts if "json_schema" in part), None)
    if not isinstance(schema, Mapping):
        return f"the grammar cannot be compiled: {problem}"
    return placed(schema, problem)


def _problem(question: GrammarQuestion) -> str:
    """Why a schema or an expression in Lark cannot be compiled by itself; "" if it can."""
    from llguidance import LLMatcher

    if question.lark:
        failed, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(question.text))
        return first_line(messages[0]) if failed else ""
    schema: Any = json.loads(question.text)
    problem = problem_of(schema)
    return placed(schema, problem) if problem else ""


def _invalid(problem: str) -> RequestError:
    return RequestError(problem, code="invalid-grammar")
