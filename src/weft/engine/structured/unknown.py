"""Problems of parts of grammars, as far as they are known: only a sandboxed process may ask the library for others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from weft.engine.structured.examination import GrammarQuestion

_answers: ContextVar[Answers | None] = ContextVar("answers", default=None)


class Answers:
    """Answers to questions. One without an answer gets "", no problem, and is kept in `missing`."""

    def __init__(self) -> None:
        self.known: dict[GrammarQuestion, str] = {}
        self.missing: list[GrammarQuestion] = []

    def answer(self, question: GrammarQuestion) -> str:
        if question not in self.known:
            self.missing.append(question)
        return self.known.get(question, "")


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Answer questions in the block by these."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def problem_of_schema(schema: Mapping[str, Any]) -> str:
    """Why a schema by itself cannot be compiled, with the place; "" if it can, or if this is not known yet."""
    return _answer(GrammarQuestion(json.dumps(schema), whole=False))


def problem_of_lark(grammar: str) -> str:
    """Why a grammar in Lark cannot be compiled; "" if it can, or if this is not known yet."""
    return _answer(GrammarQuestion(grammar, whole=False, lark=True))


def _answer(question: GrammarQuestion) -> str:
    answers = _answers.get()
    assert answers is not None, "GrammarExaminer.build has the questions answered"
    return answers.answer(question)
