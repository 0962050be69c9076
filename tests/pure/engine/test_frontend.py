"""From prompts and SamplingParams to the core's requests, and from its outputs to answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.letters import BOS, END, VOCAB, frontend, output, text_tools
from tests.refusals import refuses
from weft.engine.core.identity import RequestIdentity
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output
from weft.engine.core.step import TokenLogprobs
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.defaults import sampling_defaults
from weft.engine.frontend.frontend import stream_key
from weft.engine.frontend.prompt import Prompt, PromptLike
from weft.engine.frontend.text_tools import TextTools
from weft.engine.sandbox.isolated import run_blocking
from weft.engine.structured import examiner
from weft.engine.structured.vocabulary import list_vocabulary
from weft.errors import RequestError


def collect(params: SamplingParams, prompt: PromptLike = "hello", **changes: object) -> Collector:
    front = frontend(**changes)
    return front.create_collector(front.parse_prompt(prompt), params, arrival_s=1.0)


# Prompts


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ("ab", [BOS, 97, 98], "ab"),
        ([97, 98], [97, 98], None),
        ((97,), [97], None),
        ({"prompt": "ab"}, [BOS, 97, 98], "ab"),
        ({"prompt_token_ids": [97]}, [97], None),
        ({"prompt_token_ids": [97], "prompt": "shown"}, [97], "shown"),
    ],
)
def test_prompts_come_as_text_ids_or_dicts(prompt: object, ids: list[int], text: str | None) -> None:
    assert frontend().parse_prompt(prompt) == Prompt(TokenIds.pack(ids), text)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [{"prompt": "ab"}, {"prompt_token_ids": [97]}])
def test_a_dict_may_have_a_cache_salt(prompt: dict[str, object]) -> None:
    identities = [
        {request.identity for request in collect(SamplingParams(n=2), prompt | salt).requests}
        for salt in ({}, {"cache_salt": None}, {"cache_salt": "a"})
    ]
    assert identities == [{RequestIdentity()}, {RequestIdentity()}, {RequestIdentity(cache_salt="a")}]
    with refuses(RequestError, "invalid-cache-salt"):
        collect(SamplingParams(), prompt | {"cache_salt": ""})


@pytest.mark.parametrize(
    ("prompt", "code", "values"),
    [
        ([], "empty-prompt", []),
        ({"prompt_token_ids": []}, "empty-prompt", []),
        ({"text": "ab"}, "prompt-dict-without-prompt", ["'text'"]),
        ([97, "b"], "prompt-not-token-ids", []),
        ([97, 1.5], "prompt-not-token-ids", []),
        (7, "invalid-prompt", ["int"]),
        (b"ab", "invalid-prompt", ["bytes"]),
        ([VOCAB], "token-id-out-of-range", ["260", "259"]),
        ([-1], "token-id-out-of-range", ["-1"]),
        ("\ud800", "invalid-unicode", ["D800"]),
        ("a" * 63, "prompt-too-long", ["64", "63"]),
        ([97] * 64, "prompt-too-long", ["64", "63"]),
    ],
)
def test_prompts_that_cannot_be(prompt: object, code: str, values: list[str]) -> None:
    with refuses(RequestError, code) as refused:
        frontend().parse_prompt(prompt)  # type: ignore[arg-type]
    assert all(value in str(refused.value) for value in values)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    front = frontend()
    job = front.create_collector(front.parse_prompt([97] * 63), SamplingParams(max_tokens=None), arrival_s=0.0)
    assert job.requests[0].params.max_tokens == 1


def test_one_bos_whether_the_tokenizer_or_the_template_writes_it() -> None:
    front = frontend()
    talk = run_blocking(front.chat_prompt([{"role": "user", "content": "hi"}]))
    assert list(talk.ids).count(BOS) == 1 and next(iter(talk.ids)) == BOS
    assert front.parse_prompt(talk.text or "").ids == talk.ids


def test_a_conversation_has_its_variables_and_its_own_template() -> None:
    front, hi = frontend(), [{"role": "user", "content": "hi"}]

    def rendered(messages: Any = hi, **how: Any) -> str:
        return run_blocking(front.render_chat(messages, **how))

    assert rendered() == "<bos><s>user:hi<e><s>assistant:"
    assert rendered(add_generation_prompt=False) == "<bos><s>user:hi<e>"
    assert rendered(template_variables={"shout": True, "add_generation_prompt": False}) == "<bos><s>user:hi<e>LOUD"
    assert rendered(chat_template="{{ messages[0].content }}!") == "hi!"
    assert rendered(continue_final_message=True) == "<bos><s>user:hi"
    with refuses(RequestError, "unknown-role"):
        rendered([{"role": "robot", "content": "hi"}])
    with refuses(RequestError, "nothing-to-continue"):
        rendered(chat_template="{{ 1 }}", continue_final_message=True)
    with refuses(RequestError, "messages-not-data"):
        rendered(template_variables={"tools": print})


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    front = frontend(text_tools=TextTools())
    hi = [{"role": "user", "content": "hi"}]
    for ask in (lambda: front.parse_prompt("ab"), lambda: run_blocking(front.render_chat(hi))):
        with refuses(RequestError, "tokenizer-missing"):
            ask()
    with refuses(RequestError, "tokenizer-missing") as caught:
        front.create_collector(Prompt([1]), SamplingParams(stop="x"), arrival_s=0.0)
    assert caught.value.param == "stop"
    job = front.create_collector(Prompt([1]), SamplingParams(logprobs=1), arrival_s=0.0)
    delta = job.add(output(job.requests[0].id, "a", "length"), 1.0)
    assert delta is not None and delta.text == "" and delta.token_ids == [97]
    assert delta.logprobs is not None and delta.logprobs[0][97].decoded_token is None


# Requests


def test_n_choices_are_requests_of_their_own() -> None:
    job = collect(SamplingParams(n=3, seed=7))
    assert [request.id for request in job.requests] == ["0-0", "0-1", "0-2"]
    assert len({request.key for request in job.requests}) == 3
    assert all(request.params.n == 1 for request in job.requests)


def test_a_stream_depends_on_seed_and_choice_alone() -> None:
    front = frontend()
    seeded = SamplingParams(n=2, seed=7)
    first = front.create_collector(Prompt([1]), seeded, arrival_s=0.0)
    front.create_collector(Prompt([3]), SamplingParams(), arrival_s=0.0)
    second = frontend(seed=99).create_collector(Prompt([2]), seeded, arrival_s=0.0)
    assert [r.key for r in first.requests] == [r.key for r in second.requests]
    assert all(0 <= request.key < 2**64 for request in first.requests)


def test_without_a_seed_the_same_requests_in_the_same_order_get_the_same_keys() -> None:
    def keys(seed: int, *params: SamplingParams) -> list[int]:
        front = frontend(seed=seed)
        return [front.create_collector(Prompt([1]), p, arrival_s=0.0).requests[0].key for p in params]

    free = SamplingParams()
    assert keys(0, free, free) == keys(0, free, free)
    assert len({*keys(0, free, free), *keys(1, free, free)}) == 4
    # A request with a seed does not move the others.
    assert keys(0, SamplingParams(seed=1), free)[1] == keys(0, free)[0]
    assert stream_key("seed", 1, 23) != stream_key("seed", 12, 3)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 100))
def test_keys_are_64_bits(seed: int, choice: int) -> None:
    assert 0 <= stream_key("seed", seed, choice) < 2**64


def test_ends_of_a_request() -> None:
    assert collect(SamplingParams(stop_token_ids=(5,))).requests[0].stop_ids == (END, 5)
    assert collect(SamplingParams(stop_token_ids=(5,), ignore_eos=True)).requests[0].stop_ids == (5,)


def test_lengths_stay_within_the_model() -> None:
    assert collect(SamplingParams(max_tokens=None)).requests[0].params.max_tokens == 58
    assert collect(SamplingParams(max_tokens=1000, min_tokens=900)).requests[0].params.max_tokens == 58
    assert collect(SamplingParams(max_tokens=1000, min_tokens=900)).requests[0].params.min_tokens == 58
    assert collect(SamplingParams(max_tokens=5)).requests[0].params.max_tokens == 5


def test_bad_words_are_ids_at_the_start_and_after_a_space() -> None:
    assert collect(SamplingParams(bad_words="no")).requests[0].params.bad_word_ids == ((110, 111), (32, 110, 111))


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(field: str) -> None:
    with refuses(RequestError, "token-id-out-of-range") as caught:
        collect(SamplingParams(**{field: (VOCAB,)}))
    assert caught.value.param == field


def test_the_models_defaults_fill_what_is_unsaid() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 20}
    front = frontend(defaults=sampling_defaults(generation, "auto"))
    params = front.sampling_params({"top_p": 0.5, "temperature": None}, max_tokens=None)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.5, None)
    assert front.sampling_params({"temperature": 0.0}).temperature == 0.0
    assert sampling_defaults(generation, "vllm") == {}


# Answers


def feed(job: Collector, *texts: str | bytes | int, reason: str | None = "length") -> list[str]:
    """One token each to the first choice, the last with the reason; the texts that come out."""
    last = len(texts) - 1
    deltas = [
        job.add(output(job.requests[0].id, text, reason if at == last else None), 2.0 + at)  # type: ignore[arg-type]
        for at, text in enumerate(texts)
    ]
    return [delta.text for delta in deltas if delta is not None]


def test_an_answer_grows() -> None:
    job = collect(SamplingParams(max_tokens=3))
    name = job.requests[0].id
    job.add(output(name, "h", cached_tokens=4), 2.0)
    assert job.output.outputs[0].text == "h" and not job.output.finished
    delta = job.add(output(name, "i", "length"), 3.0)
    assert delta is not None and (delta.text, delta.finish_reason, delta.cut) == ("i", "length", False)
    made = job.output
    assert (made.prompt, made.finished, made.num_cached_tokens) == ("hello", True, 4)
    assert (made.outputs[0].text, made.outputs[0].token_ids) == ("hi", [104, 105])
    assert (made.metrics.arrival_s, made.metrics.first_token_s, made.metrics.finished_s) == (1.0, 2.0, 3.0)
    assert made.outputs[0].logprobs is None and made.outputs[0].cumulative_logprob is None


def test_no_half_characters() -> None:
    smile = "🙂".encode()
    job = collect(SamplingParams())
    assert feed(job, "a", *(smile[i : i + 1] for i in range(4))) == ["a", "", "", "", "🙂"]
    cut = collect(SamplingParams())
    assert feed(cut, smile[:1], smile[1:2]) == ["", "\ufffd"]


def test_the_token_that_ends_an_answer_is_an_id_but_no_text() -> None:
    job = collect(SamplingParams(stop_token_ids=(33,)))
    job.add(output(job.requests[0].id, "a"), 1.0)
    job.add(output(job.requests[0].id, "!", "stop", stop_reason=33), 2.0)
    made = job.output.outputs[0]
    assert (made.text, made.token_ids, made.finish_reason, made.stop_reason) == ("a", [97, 33], "stop", 33)
    kept = collect(SamplingParams(stop_token_ids=(33,), include_stop_str_in_output=True))
    assert feed(kept, "a", "!", reason="stop") == ["a", "!"]


def test_a_stop_string_across_tokens_cuts_the_answer() -> None:
    job = collect(SamplingParams(stop=("END",)))
    name = job.requests[0].id
    deltas = [job.add(output(name, letter), 1.0) for letter in "aEEND"]
    assert [delta.text for delta in deltas if delta] == ["a", "", "E", "", ""]
    last = deltas[-1]
    assert last is not None and (last.cut, last.finish_reason, last.stop_reason) == (True, "stop", "END")
    assert (job.output.outputs[0].text, job.output.finished) == ("aE", True)
    # A step that was in flight comes late.
    assert job.add(output(name, "x", "length"), 2.0) is None
    assert job.output.outputs[0].token_ids == list(b"aEEND")


def test_a_stop_string_with_the_last_token_needs_no_abort() -> None:
    job = collect(SamplingParams(stop="b"))
    assert feed(job, "a", "b") == ["a", ""]
    assert job.output.outputs[0].stop_reason == "b"


def test_the_beginning_of_a_stop_string_comes_at_the_end() -> None:
    assert feed(collect(SamplingParams(stop="END")), "E", "N") == ["", "EN"]


def test_choices_end_one_by_one() -> None:
    job = collect(SamplingParams(n=2))
    first, second = (request.id for request in job.requests)
    job.add(output(second, "b", "length"), 1.0)
    assert not job.output.finished
    job.add(output(first, "a", "stop"), 5.0)
    assert job.output.finished and job.output.metrics.finished_s == 5.0
    assert [made.finish_reason for made in job.output.outputs] == ["stop", "length"]


def test_logprobs_begin_with_the_chosen_token() -> None:
    job = collect(SamplingParams(logprobs=2))
    feed(job, "z", "A")
    made = job.output.outputs[0]
    assert made.logprobs is not None
    assert [list(position) for position in made.logprobs] == [[122, 65, 66], [65, 66]]
    assert (made.logprobs[0][122].rank, made.logprobs[0][65].rank) == (3, 1)
    assert made.logprobs[0][66].decoded_token == "B"
    assert made.cumulative_logprob == pytest.approx(-0.122 - 0.065)


def test_prompt_logprobs_have_none_first() -> None:
    job = collect(SamplingParams(prompt_logprobs=0), "ab")
    entries = [TokenLogprobs(-1.0, 5, [], []), TokenLogprobs(-2.0, 6, [], [])]
    job.add(Output(job.requests[0].id, [99], [None], "length", prompt_logprobs=entries), 1.0)
    found = job.output.prompt_logprobs
    assert found is not None and found[0] is None
    assert [next(iter(position)) for position in found[1:] if position] == [97, 98]


def test_words_come_from_the_tokenizer() -> None:
    assert text_tools().tokenizer is not None
    front = frontend()
    assert front.decode([BOS, 104, 105]) == "<bos>hi"
    with refuses(RequestError, "token-id-out-of-range"):
        front.decode([9999])


def test_the_vocabulary_waits_for_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lists it at the start."""
    tools, listed = text_tools(), []

    def list_once(*given: Any) -> Any:
        listed.append(given)
        return list_vocabulary(*given)

    monkeypatch.setattr(examiner, "list_vocabulary", list_once)
    front = frontend(text_tools=tools)
    tools.prepare_vocabulary()
    assert not listed
    for words in (["yes", "no"], ["one", "two"]):
        params = SamplingParams(structured_outputs={"choice": words})
        assert words[0] in run_blocking(front.answer_grammar(params))
    assert len(listed) == 1
    TextTools().prepare_vocabulary()  # nothing to prepare
