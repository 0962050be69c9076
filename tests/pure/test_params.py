"""SamplingParams: what is taken, what is refused, and what is said then."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.params import SamplingParams
from weft.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -0.1, "from 0"),
        ("temperature", math.nan, "nan"),
        ("temperature", math.inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", "1", "a number"),
        ("temperature", True, "a number"),
        ("temperature", None, "a number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0"),
        ("top_k", -2, "-1 for all"),
        ("top_k", 1.0, "an integer"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 2, "from 0 to 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -3, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.001"),
        ("repetition_penalty", math.inf, "to 1000"),
        ("n", 0, "from 1 to 16384"),
        ("n", 10**9, "from 1 to 16384"),
        ("n", True, "an integer"),
        ("n", None, "an integer"),
        ("max_tokens", 0, "at least 1, or None"),
        ("max_tokens", "16", "an integer"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "max_tokens, which is 16"),
        ("logprobs", -1, "not supported"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", True, "an integer"),
        ("prompt_logprobs", -1, "from 0 to 20"),
        ("seed", 1.5, "an integer"),
        ("seed", 2**64, "64-bit"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", [1], "texts"),
        ("stop", 3, "texts"),
        ("stop", b"x", "texts"),
        ("bad_words", [""], "none of them empty"),
        ("stop_token_ids", [1, -1], "-1"),
        ("stop_token_ids", ["1"], "an integer"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", 12, "a list of token ids"),
        ("stop_token_ids", [True], "an integer"),
        ("allowed_token_ids", [], "at least one id"),
        ("allowed_token_ids", [1.0], "an integer"),
        ("bad_word_ids", [1], "a list of token ids"),
        ("bad_word_ids", 1, "a list of token ids"),
        ("logit_bias", [1], "an object"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logit_bias", {-1: 1}, "token ids"),
        ("logit_bias", {1: 100.5}, "from -100 to 100"),
        ("logit_bias", {1: math.nan}, "from -100 to 100"),
        ("logit_bias", {1: "1"}, "a number"),
        ("logit_bias", {"9" * 5000: 1}, "token ids"),
        ("ignore_eos", 1, "true or false"),
        ("ignore_eos", None, "true or false"),
        ("skip_special_tokens", "yes", "true or false"),
        ("include_stop_str_in_output", 0, "true or false"),
        ("structured_outputs", {"json": {}}, "not supported yet"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(refused.value)
    assert refused.value.param == field
    assert message.startswith(field) and "\n" not in message and len(message) < 200


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
def test_what_is_taken_survives_the_wire(params: SamplingParams) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.structs.replace(params) == params


def test_it_does_not_change() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("unknown", "near"),
    [("temp", "temperature"), ("top", "top_k"), ("max_new_tokens", "max_tokens"), ("logprob", "logprobs")],
)
def test_an_unknown_parameter_names_the_nearest(unknown: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"no parameter '{unknown}'; did you mean '{near}'"):
        SamplingParams(**{unknown: 1})
    with pytest.raises(TypeError, match=r"no parameter 'zzzz'$"):
        SamplingParams(zzzz=1)  # type: ignore[call-arg]
