"""GrammarExaminer: has grammars compiled in a sandboxed process before a request may use them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from threading import Lock
from typing import TypeVar

import msgspec

from weft.engine.core.grammar import PARAM
from weft.engine.sandbox.isolated import Isolated
from weft.engine.sandbox.limits import Limits
from weft.engine.structured.examination import GrammarQuestion, encode_questions
from weft.engine.structured.unknown import Answers, answering
from weft.engine.structured.vocabulary import Vocabulary, list_vocabulary
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import RequestError

T = TypeVar("T")

TOO_COMPLEX = "grammar-too-complex"  # code of a grammar that broke the limits
TOGETHER = 64  # questions of one job, small ones of which a request may have hundreds
KEPT = 4096  # answers that are kept; each is an empty text or a problem
# A core's threads have stacks of at least 8 MiB: what passes in less does not overflow there.
LIMITS = Limits(cpu_s=5, wall_s=15.0, memory=768 << 20, stack=4 << 20, nice=10)


def key_of(question: GrammarQuestion) -> bytes:
    """Return the key of a question among the answers."""
    return blake2b(msgspec.msgpack.encode(question), digest_size=16).digest()


class GrammarExaminer:
    """Checks grammars for one vocabulary: `load` returns its tokenizer, `vocab` is the number of embedding rows.

    The vocabulary is prepared for the first grammar: most servers never see one.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab: int, eos: Sequence[int]) -> None:
        def setup() -> bytes:
            vocabulary: Vocabulary = list_vocabulary(load(), vocab, eos)
            return msgspec.msgpack.encode(vocabulary)

        self._isolated = Isolated(
            "weft.engine.structured.examination:prepare",
            setup,
            LIMITS,
            refusal="the grammar is too expensive to compile",
            param=PARAM,
            code=TOO_COMPLEX,
            lasting=False,
        )
        self._lock = Lock()  # steps of requests run in several threads
        self._answers: OrderedDict[bytes, str | RequestError] = OrderedDict()

    def close(self) -> None:
        """End the processes that it has."""
        self._isolated.close()

    async def check(self, grammar: str, param: str = PARAM) -> None:
        """Raise RequestError, with the place of the mistake, for a grammar that cannot be compiled."""
        answer = await self._ask(GrammarQuestion(grammar))
        if isinstance(answer, RequestError):
            raise RequestError(str(answer), param=param, code=answer.code)

    async def build(self, make: Callable[[], T]) -> T:
        """Return what `make` makes, which asks `engine.structured.unknown` about parts of grammars.

        It runs again once all its questions are answered, which until then have no problem.
        """
        answers = Answers()
        while True:
            answers.missing.clear()
            try:
                with answering(answers):
                    made = make()
                if not answers.missing:
                    return made
            except RequestError:
                if not answers.missing:
                    raise
            await self._answer_all(answers)

    async def _answer_all(self, answers: Answers) -> None:
        """Have the missing answers found: many together, or one by one if one of them breaks a limit."""
        missing = list(dict.fromkeys(answers.missing))
        for start in range(0, len(missing), TOGETHER):
            part = missing[start : start + TOGETHER]
            unknown = [question for question in part if self._kept(key_of(question)) is None]
            if len(unknown) > 1:
                with suppress(RequestError):
                    texts = msgspec.msgpack.decode(await self._isolated.call(encode_questions(unknown)), type=list[str])
                    for question, text in zip(unknown, texts, strict=True):
                        self._keep(key_of(question), text)
            for question in part:
                answers.known[question] = str(await self._ask(question))

    async def _ask(self, question: GrammarQuestion) -> str | RequestError:
        key = key_of(question)
        if (kept := self._kept(key)) is not None:
            return kept
        answer: str | RequestError
        try:
            (answer,) = msgspec.msgpack.decode(await self._isolated.call(encode_questions([question])), type=list[str])
        except RequestError as error:
            if error.code == TOO_COMPLEX:  # on this machine, now: it may have been busy
                return error
            answer = RequestError(str(error), param=error.param, code=error.code)  # a raised one keeps its frames' job
        self._keep(key, answer)
        return answer

    def _keep(self, key: bytes, answer: str | RequestError) -> None:
        with self._lock:
            self._answers[key] = answer
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)

    def _kept(self, key: bytes) -> str | RequestError | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)
