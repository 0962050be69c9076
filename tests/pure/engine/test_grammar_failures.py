"""Grammars that pass the check and fail in the core: an error of the request, never the end of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from tests.pure.engine.test_stop_splits import collect
from tests.pure.letters import END, VOCAB, text_tools
from tests.pure.scheduling import LIMITS, create_scheduler, request
from tests.refusals import refuses
from weft.engine.core.engine import EngineCore
from weft.engine.core.grammar import Matcher
from weft.engine.core.params import SamplingParams, StructuredOutputsParams
from weft.engine.core.request import Output
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.sequence import Sample
from weft.engine.core.step import SlotFailure, StepResult
from weft.engine.structured.grammar import body_of, grammar_text
from weft.errors import ModelError, OutputError, RequestError, WeftError


class FragileMatcher:
    """A matcher whose grammar fails with a mask, or with a token."""

    def __init__(self, *, bad_mask: int | None = None, bad_token: int | None = None) -> None:
        self.error: str | None = None
        self.ended = False
        self.bad_mask, self.bad_token = bad_mask, bad_token

    def accept(self, token: int) -> None:
        if token == self.bad_token:
            self.error = "current row has 20003 items"

    def count_valid(self, tokens: Sequence[int]) -> int:
        return len(tokens)


class FragileGrammars:
    """Masks that allow everything; each is one more of its matcher."""

    def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
        raise NotImplementedError

    def masks(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> list[bytes]:
        for matcher, _ in rows:
            if matcher.bad_mask is not None:
                matcher.bad_mask -= 1
                if matcher.bad_mask < 0:
                    matcher.error = "lexer error: too many expressions"
        return [b"\xff" * 4] * len(rows)


def run(matcher: FragileMatcher, samples: list[int], **params: Any) -> list[Output]:
    """The outputs of a request whose steps sample these tokens."""
    scheduler = create_scheduler(LIMITS)
    scheduler.grammars = FragileGrammars()
    asked = request("a", [1, 2], max_tokens=9, stop_ids=(5,), **params)
    scheduler.add(replace(asked, grammar="g"), prepared=False)
    scheduler.mark_prepared("a", matcher)
    outputs = []
    for token in samples:
        outputs += apply(scheduler, (token, None))
    return outputs


def apply(scheduler: Scheduler, sample: Sample) -> list[Output]:
    scheduled = scheduler.schedule()
    assert scheduled
    return scheduler.apply(StepResult(scheduled.step.id, [sample[0]], [sample[1]], {}))


@pytest.mark.parametrize("sampled", [5, 7], ids=["an end token", "another token"])
def test_a_mask_that_fails_is_no_end_of_the_answer(sampled: int) -> None:
    """The library allows an end token then, and nothing else."""
    *before, last = run(FragileMatcher(bad_mask=2), [6, 6, sampled])
    assert [output.tokens for output in before] == [[6], [6]]
    assert (last.tokens, last.finish_reason, last.stop_reason) == ([], "error", None)
    assert last.error is not None and (last.error.code, last.error.param) == ("grammar-failed", "structured_outputs")


def test_a_token_that_fails_ends_the_answer_with_an_error() -> None:
    (last,) = run(FragileMatcher(bad_token=6), [6])
    assert (last.tokens, last.finish_reason) == ([6], "error")
    assert last.error is not None and (last.error.code, last.error.param) == ("grammar-failed", "structured_outputs")


RULES = " | ".join(f'"number {n}"' for n in range(20_000))


@pytest.mark.parametrize("wanted", [{"regex": "a{1000000000}"}, {"grammar": f"start: {RULES}"}], ids=["regex", "rules"])
def test_the_library_s_limits_are_an_error_of_its_matcher(wanted: dict[str, Any]) -> None:
    """It says of such a matcher that it has stopped, and allows an end token."""
    grammars = text_tools().create_grammars(VOCAB, [END])
    text = grammar_text(body_of(StructuredOutputsParams(**wanted)))
    try:
        matcher: Any = grammars.compile(text, []).result()
    except RequestError:
        return  # refused before it can fail
    for token in b"aaaa" if "regex" in wanted else b"number":
        grammars.masks([(matcher, [])])
        matcher.accept(token)
        if matcher.error:
            break
    assert matcher.error and not matcher.ended


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        (RequestError("no", code="invalid-grammar", param="response_format"), "invalid-grammar", "response_format"),
        (RequestError("no", code="invalid-grammar"), "invalid-grammar", "structured_outputs"),
        (OverflowError("of the library"), "grammar-failed", "structured_outputs"),
        (ModelError("no tokenizer", code="no-tokenizer"), "no-tokenizer", ""),
    ],
)
def test_a_grammar_that_fails_to_compile_is_the_request_s_fault(error: Exception, code: str, param: str) -> None:
    class Failing(FragileGrammars):
        def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
            future: Future[Matcher] = Future()
            future.set_exception(error)
            return future

    engine = EngineCore(create_scheduler(LIMITS), None, depth=1, grammars=Failing())  # type: ignore[arg-type]
    engine.add(replace(request("a", [1], max_tokens=1), grammar="g"))
    engine.pump()
    (output,) = engine.take_uncompiled()
    assert output.error is not None and (output.error.code, output.error.param) == (code, param)


@pytest.mark.parametrize(("param", "kind"), [("structured_outputs", RequestError), ("", OutputError)])
def test_the_caller_hears_whose_fault_it_is(param: str, kind: type[WeftError]) -> None:
    job = collect(SamplingParams(max_tokens=8))
    job.raise_failure()
    job.add(Output(job.requests[0].id, [], [], "error", error=SlotFailure("grammar-failed", "it failed", param)), 0.0)
    with refuses(kind, "grammar-failed") as caught:
        job.raise_failure()
    assert job.output.outputs[0].finish_reason == "error"
    assert not isinstance(caught.value, RequestError) or caught.value.param == param
