"""Answers that began elsewhere (`Request.answered`): the rest is that of the undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.cpu import tiny
from weft import LLM, SamplingParams
from weft.engine.core import kv
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.prompt import Prompt
from weft.errors import RequestError

PROMPTS = [list(range(65, 65 + length)) for length in (3, 17, 30)]
DRAWN = SamplingParams(temperature=1.5, seed=7, max_tokens=24, min_tokens=9, ignore_eos=True, logprobs=2)
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
    "drawn": DRAWN,
    "penalties": SamplingParams(
        temperature=1.2, seed=3, max_tokens=24, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3
    ),
    "bad words": SamplingParams(temperature=2.0, seed=5, max_tokens=24, bad_words=["ab", "c"], ignore_eos=True),
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 7},
    "ahead": {"async_scheduling": True},
    "guessed": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "stages": {"pipeline_parallel_size": 2},
    "preempted": {"max_model_len": 72, "kv_cache_memory_bytes": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("continued")))


def answers(llm: LLM, prompts: list[Prompt], params: SamplingParams) -> list[Collector]:
    """The collectors of all prompts, answered at once; each checks that its deltas are the whole."""
    collectors = [llm._frontend.create_collector(prompt, params, arrival_s=0.0) for prompt in prompts]
    owners = {request.id: collector for collector in collectors for request in collector.requests}
    submission = llm._engine.submit([request for collector in collectors for request in collector.requests])
    begun = {id: owner.output.outputs[0].text for id, owner in owners.items()}
    for output in submission:
        delta = owners[output.id].add(output, 0.0)
        if delta is not None:
            begun[output.id] += delta.text
            if delta.cut:
                submission.abort([output.id])
    assert [owner.output.outputs[0].text for owner in owners.values()] == list(begun.values())
    return collectors


@pytest.mark.parametrize("how", ENGINES.values(), ids=ENGINES.keys())
def test_the_rest_is_that_of_the_undisturbed_run(
    model: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = "kv_cache_memory_bytes" in how
    if small:
        monkeypatch.setattr(kv, "GROWTH", 1)
        how = {**how, "kv_cache_memory_bytes": 24 * 4 * 2 * 2 * 2 * 16 * 4}  # 24 blocks of 4 tokens
    with LLM(model, dtype="float32", executor="inline", block_size=4, load_format="dummy", **how) as llm:
        for params in KINDS.values():
            whole = [c.output.outputs[0] for c in answers(llm, [Prompt(TokenIds.pack(ids)) for ids in PROMPTS], params)]
            cuts = [
                (number, cut)
                for number, done in enumerate(whole)
                for cut in (1, 8, 9, len(done.token_ids) - 1)
                if 0 < cut < len(done.token_ids)
            ]
            prompts = [
                Prompt(TokenIds.pack(PROMPTS[number]), answered=TokenIds.pack(whole[number].token_ids[:cut]))
                for number, cut in cuts
            ]
            for (number, cut), collector in zip(cuts, answers(llm, prompts, params), strict=True):
                found, done = collector.output.outputs[0], whole[number]
                assert (found.token_ids, found.text) == (done.token_ids, done.text)
                assert (found.finish_reason, found.stop_reason) == (done.finish_reason, done.stop_reason)
                if done.logprobs is not None:
                    assert len(found.logprobs or []) == len(done.token_ids) - cut
                    for one, other in zip(found.logprobs or [], done.logprobs[cut:], strict=True):
                        assert one.keys() == other.keys()
                        assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()])
        stats = llm.stats()
    assert bool(stats.preemptions) == small


def test_stop_strings_and_limits_go_on(model: str) -> None:
    with LLM(model, dtype="float32", executor="inline", load_format="dummy") as llm:
        (whole,) = answers(llm, [Prompt(TokenIds.pack(PROMPTS[1]))], DRAWN)
        ids = whole.output.outputs[0].token_ids
        # A text that spans the cut, and one that has come before it but does not count there yet.
        tokenizer = llm._frontend.tokenizer
        assert tokenizer is not None
        letters = [tokenizer.decode([token]) for token in ids]
        spanning = next(
            (at, letters[at] + letters[at + 1])
            for at in range(9, 22)
            if (letters[at] + letters[at + 1]).isascii() and letters[at] and letters[at + 1]
        )
        at, stop = spanning
        params = msgspec.structs.replace(DRAWN, stop=(stop,), min_tokens=at)
        (cut_whole,) = answers(llm, [Prompt(TokenIds.pack(PROMPTS[1]))], params)
        assert cut_whole.output.outputs[0].stop_reason == stop
        answered = TokenIds.pack(ids[: at + 1])
        (continued,) = answers(llm, [Prompt(TokenIds.pack(PROMPTS[1]), answered=answered)], params)
        assert continued.output.outputs[0] == replace_logprobs(cut_whole, continued)


def replace_logprobs(whole: Collector, continued: Collector) -> Any:
    """The output of `whole` with the logprobs of `continued`, which has only those of its own tokens."""
    found = continued.output.outputs[0]
    return replace(whole.output.outputs[0], logprobs=found.logprobs, cumulative_logprob=found.cumulative_logprob)


@pytest.mark.parametrize(
    ("ids", "fields", "code"),
    [
        ([65, 300], {}, "token-id-out-of-range"),
        ([65, tiny.END], {}, "nothing-to-continue"),
        ([65] * 16, {}, "nothing-to-continue"),
        ([65, 66], {"stop": ["AB"]}, "nothing-to-continue"),
        ([65], {"n": 2}, "continuation-not-possible"),
        ([65], {"prompt_logprobs": 1}, "continuation-not-possible"),
    ],
    ids=str,
)
def test_what_cannot_go_on(model: str, ids: list[int], fields: dict[str, Any], code: str) -> None:
    with LLM(model, dtype="float32", executor="inline", load_format="dummy") as llm:
        prompt = Prompt(TokenIds.pack(PROMPTS[0]), answered=TokenIds.pack(ids))
        with pytest.raises(RequestError) as refused:
            llm._frontend.create_collector(prompt, SamplingParams(max_tokens=16, **fields), arrival_s=0.0)
    assert refused.value.code == code and refused.value.param == "continue_token_ids"
