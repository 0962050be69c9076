"""AnswerStream: the answers of `LLM.stream`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NoReturn

from weft.engine.frontend.outputs import RequestOutput


class AnswerStream(Generator[RequestOutput, None, None]):
    """An iterator over a growing answer, for plain `for` loops."""

    def __init__(self, answers: Generator[RequestOutput, None, None]) -> None:
        self._answers = answers

    def send(self, value: None) -> RequestOutput:
        return self._answers.send(value)

    def throw(self, *error: Any) -> RequestOutput:
        return self._answers.throw(*error)

    def __aiter__(self) -> NoReturn:
        raise TypeError(
            "LLM.stream is for plain `for` loops; in asyncio use weft.AsyncLLM: "
            "`async for output in AsyncLLM(model).generate(prompt)`"
        )
