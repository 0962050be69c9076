"""Constrained answers through a whole engine: in every layout, with drafts, preemption and several choices."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.cpu import tiny
from tests.refusals import refuses
from weft import LLM, SamplingParams, StructuredOutputsParams
from weft.engine.core import kv
from weft.errors import RequestError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 6, "pattern": "^[a-z]+$"},
        "size": {"type": "integer", "minimum": 3, "maximum": 120},
        "parts": {"type": "array", "items": {"enum": ["a", "bb", True]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
PREEMPTING = {"kv_cache_memory_bytes": 40 * 2048, "block_size": 4}
COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "executor": "inline", "load_format": "dummy"}


def wanting(number: int = 0, **fields: Any) -> SamplingParams:
    """Parameters with a seed, and a temperature from 0 to 1 by `number`."""
    given = {"structured_outputs": {"json": SCHEMA}, **fields}
    return SamplingParams(**{"temperature": number % 5 / 4, "seed": number, "max_tokens": 120, **given})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("structured")))


PARAMS = [*map(wanting, range(8)), SamplingParams(max_tokens=20, seed=1), wanting(3, structured_outputs=None)]
PROMPTS = [f"say {number} {number} " * (1 + number % 3) for number in range(len(PARAMS))]


def answers(model: str, **how: Any) -> list[tuple[list[int], str | None]]:
    with LLM(model, **{**COMMON, **how}) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        assert (llm.stats().preemptions > 0) == (how == PREEMPTING)
    for output in outputs[:8]:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)
        assert not re.search(r"[ \n]{2}|[\t\r]", output.text)
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def truth(model: str) -> list[tuple[list[int], str | None]]:
    return answers(model)


@pytest.mark.parametrize(
    "how",
    [
        {"attention_backend": "torch"},
        {"tensor_parallel_size": 2},
        {"tensor_split": (3, 1)},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "async_scheduling": True},
        {"data_parallel_size": 2},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"max_num_seqs": 3, "max_num_batched_tokens": 32},
        PREEMPTING,
        {"executor": "processes"},
    ],
    ids=["torch", "tp2", "tp 3:1", "pp2", "tp2 x pp2", "dp2", "ahead", "drafts", "waiting", "preemption", "processes"],
)
def test_every_layout_gives_the_same_valid_answers(
    request: pytest.FixtureRequest,
    model: str,
    truth: list[tuple[list[int], str | None]],
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == PREEMPTING:
        monkeypatch.setattr(kv, "GROWTH", 1)
    if "data_parallel_size" in how:
        request.getfixturevalue("two_cores")
    assert answers(model, **how) == truth


MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model with experts."""
    path = tiny.write(tmp_path_factory.mktemp("mixture"))
    (path / "config.json").write_text(json.dumps({**tiny.CONFIG, **MIXTURE}))
    return str(path)


@pytest.fixture(scope="module")
def mixed_truth(mixture: str) -> list[tuple[list[int], str | None]]:
    return answers(mixture)


@pytest.mark.parametrize(
    "how",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["ep2", "dp2 x ep2", "dp2 x ep2, drafts"],
)
def test_every_layout_of_experts_gives_the_same_valid_answers(
    mixture: str, mixed_truth: list[tuple[list[int], str | None]], how: dict[str, Any]
) -> None:
    assert answers(mixture, enable_expert_parallel=True, **how) == mixed_truth


def test_drafts_are_accepted_in_a_grammar(model: str, truth: list[tuple[list[int], str | None]]) -> None:
    """A text that repeats itself is guessed right, and every accepted guess is in the grammar."""
    with LLM(model, **COMMON, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
        many = wanting(0, structured_outputs={"regex": "(abc){20,30}"})
        [output] = llm.generate(["abcabcabc"], many, use_tqdm=False)
        stats = llm.stats()
    assert re.fullmatch("(abc){20,30}", output.outputs[0].text)
    assert stats.accepted_tokens > 20 and stats.steps < 45


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{4}[0-9]+x"}, "[a-c]{4}[0-9]+x"),
        ({"choice": ["yes", 'n"o\\', "é"]}, 'yes|n"o\\\\|é'),
        ({"grammar": 'root ::= "<" [xy]* ">"'}, "<[xy]*>"),
        ({"grammar": 'start: "a" b\nb: /[0-9]{3}/'}, "a[0-9]{3}"),
        (StructuredOutputsParams(json_object=True), r"\{.*\}"),
    ],
    ids=["regex", "choice", "gbnf", "lark", "json_object"],
)
def test_what_an_answer_can_be_wanted_to_be(model: str, wanted: Any, pattern: str) -> None:
    with LLM(model, **COMMON) as llm:
        params = [wanting(number, structured_outputs=wanted, n=2, logit_bias={ord(">"): 2.0}) for number in range(4)]
        for output in llm.generate(["a"] * 4, params, use_tqdm=False):
            for choice in output.outputs:
                if choice.finish_reason == "stop":
                    assert re.fullmatch(pattern, choice.text, re.DOTALL), choice.text
                else:
                    assert choice.finish_reason == "length"


def test_a_prompt_in_chunks_comes_before_its_constrained_answer(model: str) -> None:
    """In the steps of all chunks but the last, nothing is sampled."""
    with LLM(model, **COMMON, max_num_seqs=2, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate(["say it " * 8], wanting(structured_outputs={"choice": ["yes", "no"]}), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


def test_an_answer_that_is_cut_says_length(model: str) -> None:
    with LLM(model, **COMMON) as llm:
        [output] = llm.generate(["a"], wanting(1, max_tokens=9), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].text.startswith("{")


@pytest.mark.parametrize(
    ("wanted", "code", "place"),
    [
        ({"json": {"properties": {"a": {"items": {"type": "objekt"}}}}}, "invalid-grammar", r"\$.properties.a.items: "),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "invalid-grammar", r"at \$: "),
        ({"json": "{"}, "schema-not-json", "json"),
        ({"json": [1]}, "schema-not-object", "object"),
        ({"json": {"enum": ["x" * 600_000]}}, "grammar-too-large", "524,288"),
        ({"regex": "(a"}, "invalid-grammar", "unclosed group"),
        ({"grammar": "start: foo"}, "invalid-grammar", "foo"),
        ({"grammar": "root ::= ("}, "invalid-grammar", "GBNF"),
        ({"choice": []}, "empty-choice", "at least one"),
        ({"choice": ["a"], "regex": "a"}, "invalid-structured-outputs", "json|regex|choice"),
        ({"jsn": {}}, "invalid-structured-outputs", "jsn"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(model: str, wanted: Any, code: str, place: str) -> None:
    with LLM(model, **COMMON) as llm, refuses(RequestError, code) as refused:
        llm.generate(["a"], SamplingParams(structured_outputs=wanted), use_tqdm=False)
    assert re.search(place, str(refused.value))
