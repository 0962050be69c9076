"""Problems of parts of grammars, as far as they are known: only a sandboxed process may ask the library for others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from weft.structured.examination import Question

_answers: ContextVar[Mapping[Question, str] | None] = ContextVar("answers", default=None)


class UnknownProblem(Exception):
    """A question that has no answer yet. Whoever has it answered may call again what asked."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.text)
        self.question = question


@contextmanager
def answering(answers: Mapping[Question, str]) -> Iterator[None]:
    """Answer questions in the block by these."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def problem_of_schema(schema: Mapping[str, Any]) -> str:
    """Why a schema by itself cannot be compiled, with the place; "" if it can. Raises UnknownProblem."""
    return _answer(Question(json.dumps(schema), whole=False))


def problem_of_lark(grammar: str) -> str:
    """Why a grammar in Lark cannot be compiled; "" if it can. Raises UnknownProblem."""
    return _answer(Question(grammar, whole=False, lark=True))


def _answer(question: Question) -> str:
    answers = _answers.get() or {}
    if question not in answers:
        raise UnknownProblem(question)
    return answers[question]
