"""The examiner of grammars: it keeps nothing of those that it refuses but the answer."""

from __future__ import annotations

import json

from tests.pure.letters import END, VOCAB, text_tools
from tests.refusals import refuses
from weft.engine.sandbox.isolated import run_blocking
from weft.engine.structured.examiner import GrammarExaminer
from weft.errors import RequestError


def test_nothing_of_a_refused_grammar_is_kept_but_the_answer() -> None:
    tokenizer = text_tools().tokenizer
    assert tokenizer is not None
    examiner = GrammarExaminer(lambda: tokenizer, VOCAB, (END,))
    grammar = json.dumps({"grammars": [{"lark_grammar": 'start: "a" nothing'}]})
    try:
        for _ in range(2):
            with refuses(RequestError, "invalid-grammar", "nothing"):
                run_blocking(examiner.check(grammar))
        (answer,) = examiner._answers.values()
        assert isinstance(answer, RequestError)
        assert answer.__traceback__ is None and answer.__context__ is None  # whose frames have the grammar
    finally:
        examiner.close()
