"""Chunks that upstreams send: right ones, odd ones, and too many; what the gateway makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.refusals import refuses
from weft.fleet.gateway import answer as answers
from weft.fleet.gateway.answer import StreamedAnswer
from weft.fleet.gateway.events import EventSplitter
from weft.fleet.upstreams.upstream import UpstreamError

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(text: str, ids: Any = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}], **fields}


def texts(shown: bytes) -> list[str]:
    found = [json.loads(line[6:]) for line in shown.split(b"\n\n") if line]
    assert not any("token_ids" in choice for row in found for choice in row["choices"])
    return [choice.get("text") for row in found for choice in row["choices"]]


# The end of a stream


@pytest.mark.parametrize("continuable", [False, True])
@pytest.mark.parametrize("blank", [b"", b"\n", b"\r\n"])
def test_the_last_event_may_lack_its_blank_line(continuable: bool, blank: bytes) -> None:
    answer = StreamedAnswer(continuable=continuable)
    shown = answer.push(event(chunk("a", [1], "stop")) + b"data: [DONE]" + blank)
    assert b"[DONE]" not in shown and not answer.done
    assert b"[DONE]" in answer.finish() and answer.done
    answer.check()
    answer.check_complete()


def test_the_usage_of_a_last_event_without_its_blank_line_counts() -> None:
    answer = StreamedAnswer(continuable=False, keeps_usage=False)
    answer.push(event(chunk("a")) + b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode())
    assert answer.usage is None
    assert answer.finish() == b"" and answer.usage == USAGE


@pytest.mark.parametrize("rest", [b'data: {"ha', b"da", b"data: 3", b": comm"])
def test_half_an_event_is_passed_on_only_if_nobody_continues_the_answer(rest: bytes) -> None:
    continued, other = StreamedAnswer(continuable=True), StreamedAnswer(continuable=False)
    for answer in (continued, other):
        answer.push(event(chunk("a", [1])) + rest)
    assert continued.finish() == b"" and other.finish() == rest
    assert continued.token_ids == [1]
    with refuses(UpstreamError, "closed-in-response"):
        continued.check_complete()


def test_the_rest_is_taken_once() -> None:
    splitter = EventSplitter()
    assert splitter.push(b"a\n\nb") == [b"a\n\n"]
    assert [splitter.take_rest() for _ in range(2)] == [b"b", b""]


# Odd chunks


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "b", "token_ids": "xy"},
        {"text": "b", "token_ids": [1.5]},
        {"text": "b", "token_ids": [True]},
        {"text": "b", "token_ids": [-1]},
        {"text": "b", "token_ids": [2**31]},
        {"text": "b", "token_ids": {"a": 1}},
        {"text": "b", "delta": [1], "token_ids": [2]},
        {"text": "b", "delta": "x", "token_ids": [2]},
    ],
    ids=str,
)
def test_ids_that_are_none_end_only_the_continuing(choice: dict[str, Any]) -> None:
    answer = StreamedAnswer(continuable=True)
    shown = answer.push(event(chunk("a", [1])) + event({"choices": [{"index": 0, **choice}]}) + event(chunk("c", [3])))
    answer.check()
    assert texts(shown) == ["a", "b", "c"]
    assert not answer.continuable and not answer.token_ids


@pytest.mark.parametrize("choices", [{"a": 1}, "x", [3], [None], 7], ids=str)
def test_choices_that_are_none_pass(choices: Any) -> None:
    answer = StreamedAnswer(continuable=True)
    sent = {"choices": choices, "usage": None}
    assert json.loads(answer.push(event(sent))[6:]) == sent
    answer.check()


def test_a_long_answer_holds_no_more_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_HELD_IDS", 10)
    answer = StreamedAnswer(continuable=True)
    shown = b"".join(answer.push(event(chunk("ab", [1, 2]))) for _ in range(20))
    assert texts(shown) == ["ab"] * 20
    assert not answer.continuable and not answer.token_ids


# Usage


def test_usage_in_every_chunk_does_not_replace_the_last_one() -> None:
    answer = StreamedAnswer(continuable=True)
    for count in (1, 2):
        answer.push(event(chunk("a", [count], usage={**USAGE, "completion_tokens": count})))
        assert answer.usage is None and answer.lacks_usage
    answer.push(event(chunk("", [3], "stop", usage=USAGE)))
    assert answer.usage == USAGE and answer.finished and answer.lacks_usage
    answer.push(event({"choices": [], "usage": USAGE}))
    assert not answer.lacks_usage


def test_a_client_that_did_not_ask_for_usage_lacks_none() -> None:
    answer = StreamedAnswer(continuable=True, keeps_usage=False)
    assert not answer.lacks_usage
    assert answer.push(event({"choices": [], "usage": USAGE})) == b"" and answer.usage == USAGE
