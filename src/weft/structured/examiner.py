"""GrammarExaminer: has grammars compiled in a sandboxed process before a request may use them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import TypeVar

import msgspec

from weft.errors import RequestError
from weft.sandbox.isolated import Isolated
from weft.sandbox.limits import Limits
from weft.structured.examination import Question
from weft.structured.grammar import PARAM
from weft.structured.unknown import UnknownProblem, answering
from weft.structured.vocabulary import Vocabulary, list_vocabulary
from weft.text.tokenizer import Tokenizer

T = TypeVar("T")

TOO_COMPLEX = "grammar-too-complex"  # code of a grammar that broke the limits
KEPT = 4096  # answers that are kept; each is an empty text or a problem
# A core's threads have stacks of at least 8 MiB: what passes in less does not overflow there.
LIMITS = Limits(cpu_s=5, wall_s=15.0, memory=768 << 20, stack=4 << 20, nice=10)


class GrammarExaminer:
    """Checks grammars for one vocabulary: `load` returns its tokenizer, `vocab` is the number of embedding rows.

    The vocabulary is prepared for the first grammar: most servers never see one.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab: int, eos: Sequence[int]) -> None:
        def setup() -> bytes:
            vocabulary: Vocabulary = list_vocabulary(load(), vocab, eos)
            return msgspec.msgpack.encode(vocabulary)

        self._isolated = Isolated(
            "weft.structured.examination:prepare",
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
        answer = await self._ask(Question(grammar))
        if isinstance(answer, RequestError):
            raise RequestError(str(answer), param=param, code=answer.code)

    async def build(self, make: Callable[[], T]) -> T:
        """Return what `make` makes, which asks `structured.unknown` about parts of grammars; it runs again for each."""
        answers: dict[Question, str] = {}
        while True:
            try:
                with answering(answers):
                    return make()
            except UnknownProblem as unknown:
                answer = await self._ask(unknown.question)
                answers[unknown.question] = str(answer)

    async def _ask(self, question: Question) -> str | RequestError:
        job = msgspec.msgpack.encode(question)
        key = blake2b(job, digest_size=16).digest()
        if (kept := self._kept(key)) is not None:
            return kept
        answer: str | RequestError
        try:
            answer = (await self._isolated.call(job)).decode()
        except RequestError as error:
            if error.code == TOO_COMPLEX:  # on this machine, now: it may have been busy
                return error
            answer = RequestError(str(error), param=error.param, code=error.code)  # a raised one keeps its frames' job
        with self._lock:
            self._answers[key] = answer
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return answer

    def _kept(self, key: bytes) -> str | RequestError | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)
