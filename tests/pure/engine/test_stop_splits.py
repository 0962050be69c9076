"""An answer is the same however the core divides its tokens among outputs, as accepted draft tokens do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.pure.letters import END, frontend
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output
from weft.engine.core.step import SlotFailure, TokenLogprobs
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.collector import Collector
from weft.fleet.gateway.answer import StreamedAnswer

FAILURE = SlotFailure("grammar-failed", "the answer's grammar failed")
LETTERS = st.sampled_from([*b"abc", *"é🙂".encode()])
STOPS = st.lists(st.sampled_from(["a", "b", "ab", "bc", "abc", "cab", "é", "🙂", "\ufffd"]), max_size=3, unique=True)


def collect(params: SamplingParams, answered: tuple[int, ...] = ()) -> Collector:
    front = frontend()
    prompt = replace(front.parse_prompt("hi"), answered=TokenIds.pack(answered))
    return front.create_collector(prompt, params, arrival_s=0.0)


def splits(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to divide `count` tokens into outputs, as pairs of the first token and the one behind the last."""
    for edges in product([False, True], repeat=count - 1):
        yield list(pairwise([0, *(at for at, edge in enumerate(edges, 1) if edge), count]))


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(-0.1 * (token % 7 + 1), 2, [token + 1], [-0.05])


def answer(job: Collector, tokens: list[int], reason: str, split: list[tuple[int, int]]) -> dict[str, Any]:
    """Give each choice the outputs of a split; return all that its callers can see."""
    deltas: dict[int, list[Any]] = {}
    for request in job.requests:
        for first, end in split:
            last = end == len(tokens)
            delta = job.add(
                Output(
                    request.id,
                    tokens[first:end],
                    [entry(token) for token in tokens[first:end]],
                    reason if last else None,  # type: ignore[arg-type]
                    error=FAILURE if last and reason == "error" else None,
                ),
                0.0,
            )
            if delta is None:
                continue
            deltas.setdefault(delta.index, []).append(delta)
            assert delta.cut is (delta.finish_reason is not None and not last)
    made = job.output
    assert made.finished
    for choice in made.outputs:
        of_choice = deltas[choice.index]
        assert "".join(delta.text for delta in of_choice) == choice.text
        assert [token for delta in of_choice for token in delta.token_ids] == choice.token_ids
        logprobs = [position for delta in of_choice for position in delta.logprobs or ()]
        assert logprobs == (choice.logprobs or [])
        assert choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)
    return {"choices": made.outputs, "error": job.error}


@given(
    tokens=st.lists(LETTERS, min_size=1, max_size=6),
    reason=st.sampled_from(["length", "stop", "error"]),
    stops=STOPS,
    keep=st.booleans(),
    early=st.integers(0, 4),
    logprobs=st.sampled_from([None, 0, 1]),
    choices=st.integers(1, 2),
)
def test_every_split_of_an_answer_gives_one_result(
    tokens: list[int], reason: str, stops: list[str], keep: bool, early: int, logprobs: int | None, choices: int
) -> None:
    if reason == "stop":
        tokens = [*tokens, END]
    params = SamplingParams(
        stop=tuple(stops),
        include_stop_str_in_output=keep,
        min_tokens=early,
        logprobs=logprobs,
        n=choices,
        max_tokens=20,
    )
    seen = [answer(collect(params), tokens, reason, split) for split in splits(len(tokens))]
    assert all(one == seen[0] for one in seen)


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    job = collect(SamplingParams(stop="b", logprobs=0, max_tokens=8))
    made = answer(job, list(b"abcd"), "length", [(0, 4)])["choices"][0]
    assert (made.text, made.token_ids, made.finish_reason, made.stop_reason) == ("a", [97, 98], "stop", "b")
    assert made.logprobs is not None and len(made.logprobs) == 2
    assert made.cumulative_logprob == pytest.approx(entry(97).logprob + entry(98).logprob)


def test_a_failure_behind_a_stop_string_is_none_and_one_at_its_token_is() -> None:
    behind = collect(SamplingParams(stop="b", max_tokens=8))
    assert answer(behind, list(b"abc"), "error", [(0, 3)])["choices"][0].finish_reason == "stop"
    assert behind.error is None
    there = collect(SamplingParams(stop="b", max_tokens=8))
    assert answer(there, list(b"ab"), "error", [(0, 2)])["choices"][0].finish_reason == "error"
    assert there.error == FAILURE


@pytest.mark.parametrize("cut", [[(0, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]])
def test_another_replica_repeats_the_end_of_an_answer_that_a_stop_string_ended(cut: list[tuple[int, int]]) -> None:
    """A replica that dies between the last chunk and the usage: the gateway has the next one sample the end again."""
    params = SamplingParams(stop="b", max_tokens=8)
    made = answer(collect(params), list(b"abcd"), "length", cut)["choices"][0]
    relayed = StreamedAnswer(continuable=True)
    chunk = b'{"choices":[{"index":0,"delta":{"content":"a"},"token_ids":%s,"finish_reason":"stop"}]}'
    relayed.push(b"data: " + chunk % str(made.token_ids).encode() + b"\n\n")
    assert relayed.finished and relayed.lacks_usage
    again = collect(params, tuple(relayed.resume()))
    name = again.requests[0].id
    again.add(Output(name, list(b"b"), [entry(98)], "length"), 0.0)
    repeated = again.output.outputs[0]
    assert (repeated.token_ids, repeated.text, repeated.finish_reason) == (made.token_ids, made.text, "stop")
