"""Token ids in SamplingParams against the vocabulary, and priorities."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.refusals import refuses
from weft.engine.core.params import SamplingParams
from weft.engine.frontend.checks import MAX_SALT, check_cache_salt, check_ids, check_priority
from weft.errors import RequestError

FIELDS: list[tuple[str, Any]] = [
    ("stop_token_ids", lambda token: {"stop_token_ids": (0, token)}),
    ("logit_bias", lambda token: {"logit_bias": {0: 1.0, token: -1.0}}),
    ("allowed_token_ids", lambda token: {"allowed_token_ids": (0, token)}),
    ("bad_words", lambda token: {"bad_word_ids": ((0,), (token, 0))}),
]


@pytest.mark.parametrize(("field", "params"), FIELDS)
def test_an_id_outside_the_vocabulary_is_refused_by_name(field: str, params: Any) -> None:
    check_ids(SamplingParams(**params(99)), 100)
    with refuses(RequestError, "token-id-out-of-range") as caught:
        check_ids(SamplingParams(**params(100)), 100)
    assert caught.value.param == field
    assert re.search(rf"^{field} .*\b100\b.*\b99$", str(caught.value))


def test_nothing_said_is_nothing_wrong() -> None:
    check_ids(SamplingParams(), 1)


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, "high", 1.5])
def test_a_priority_that_cannot_be_sent_is_refused(priority: Any) -> None:
    with refuses(RequestError, "invalid-priority") as caught:
        check_priority(priority)
    assert caught.value.param == "priority"


def test_the_outermost_priorities_can_be_sent() -> None:
    check_priority(2**63 - 1)
    check_priority(-(2**63))


@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT + 1), 7, b"x", "half a pair: \ud800"])
def test_a_cache_salt_that_is_no_short_text_is_refused(salt: Any) -> None:
    with refuses(RequestError, "invalid-cache-salt", MAX_SALT) as caught:
        check_cache_salt(salt)
    assert caught.value.param == "cache_salt"
    for good in (None, "x", "é" * MAX_SALT):
        check_cache_salt(good)
