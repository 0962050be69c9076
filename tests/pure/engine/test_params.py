"""SamplingParams: what is taken, what is refused, and what is said then."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.engine.core.params import SamplingParams, StructuredOutputsParams
from weft.errors import RequestError

# Values that a field cannot have.
REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 2),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("n", 0),
    ("n", 10**9),
    ("n", True),
    ("n", None),
    ("max_tokens", 0),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("seed", 1.5),
    ("seed", 2**64),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 3),
    ("stop", b"x"),
    ("bad_words", [""]),
    ("stop_token_ids", [1, -1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 12),
    ("stop_token_ids", [True]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1.0]),
    ("bad_word_ids", [1]),
    ("bad_word_ids", 1),
    ("logit_bias", [1]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: "1"}),
    ("logit_bias", {"9" * 5000: 1}),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("skip_special_tokens", "yes"),
    ("include_stop_str_in_output", 0),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refused(field: str, value: Any) -> None:
    with refuses(RequestError, "invalid-parameter") as refused:
        SamplingParams(**{field: value})
    message = str(refused.value)
    assert refused.value.param == field
    assert message.startswith(field) and "\n" not in message and len(message) < 200


def test_the_words_of_refusals(golden: Callable[[str, str], None]) -> None:
    lines = []
    for field, value in REFUSED:
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        lines.append(f"{field}={value!r:.40}\n  {refused.value}\n")
    golden("errors/sampling_params.txt", "".join(lines))


@pytest.mark.parametrize("wanted", [{}, {"jsn": {}}, {"json": {}, "regex": "a"}, {"choice": "a"}, 5])
def test_structured_outputs_are_checked(wanted: object) -> None:
    with refuses(RequestError, "invalid-structured-outputs") as refused:
        SamplingParams(structured_outputs=wanted)  # type: ignore[arg-type]
    assert refused.value.param == "structured_outputs"


def test_structured_outputs_may_be_vllms_object() -> None:
    given = SimpleNamespace(json=None, regex="a+", choice=None, grammar=None, json_object=False)
    wanted = StructuredOutputsParams(regex="a+")
    assert SamplingParams(structured_outputs=given).structured_outputs == wanted  # type: ignore[arg-type]
    assert SamplingParams(structured_outputs=wanted).structured_outputs is wanted


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert not params.greedy and SamplingParams(temperature=0).greedy


def test_sequences_become_tuples() -> None:
    given: dict[str, Any] = {
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "allowed_token_ids": [3],
        "bad_words": "x",
        "bad_word_ids": [[1], (2, 3), []],
        "logit_bias": {"7": 1, 8: -2.5},
    }
    params = SamplingParams(**given)
    assert params.stop == ("a", "b") and params.bad_words == ("x",)
    assert params.stop_token_ids == (1, 2) and params.allowed_token_ids == (3,)
    assert params.bad_word_ids == ((1,), (2, 3))
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert SamplingParams(stop="whole").stop == ("whole",)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()  # type: ignore[arg-type]
    # What the caller does to its own dict later is its own business.
    given["logit_bias"][9] = 1.0
    assert 9 not in (params.logit_bias or {})


def test_values_that_mean_another() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(temperature=1e-9).greedy
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500


def test_numbers_of_other_libraries() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
    )
    assert type(params.temperature) is float and type(params.top_k) is int
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 16384),
        temperature=st.floats(0, 1e6) | st.integers(0, 10),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(-1, 1000),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.001, 1000),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        stop=st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
        max_tokens=st.none() | st.integers(5, 10**9),
        min_tokens=st.integers(0, 5),
        logprobs=st.none() | st.integers(0, 20),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
        bad_word_ids=st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=3), max_size=2),
    )
)
def test_accepted_values_survive_the_wire(params: SamplingParams) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.structs.replace(params) == params


def test_parameters_do_not_change() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("unknown", "near"),
    [("temp", "temperature"), ("top", "top_k"), ("max_new_tokens", "max_tokens"), ("logprob", "logprobs")],
)
def test_an_unknown_parameter_names_the_nearest(unknown: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"'{unknown}'.*'{near}'"):
        SamplingParams(**{unknown: 1})
    with pytest.raises(TypeError, match=r"'zzzz'$"):
        SamplingParams(zzzz=1)  # type: ignore[call-arg]


def test_what_generation_configs_leave_out() -> None:
    """The wrapper of the Qwen guide passes the fields of Transformers' GenerationConfig, of which some are None."""
    left_out = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"))
    assert SamplingParams(**left_out, max_tokens=16) == SamplingParams()  # type: ignore[arg-type]


def test_fields_of_other_versions_of_vllm_that_ask_for_nothing() -> None:
    nothing: dict[str, Any] = {"early_stopping": False, "use_beam_search": False, "best_of": None}
    assert SamplingParams(top_p=0.5, **nothing) == SamplingParams(top_p=0.5)
    for field, value in (("early_stopping", True), ("use_beam_search", True), ("best_of", 3)):
        with pytest.raises(TypeError, match=field):
            SamplingParams(**{field: value})  # type: ignore[arg-type]
