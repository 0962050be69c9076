"""LLM, on small random weights in this process."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu import tiny
from tests.log_events import logged
from tests.pure.letters import BOS, END
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.engine.core.step import StepPlan, StepResult
from weft.errors import ConfigError, ModelError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_memory_bytes": 2**20,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny", temperature=0.0, top_k=7)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE, max_num_seqs=4, max_num_queued_reqs=2) as made:
        yield made


def at_rest(llm: LLM) -> bool:
    """No request and no block is held."""
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_answers_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = ["a", [98, 99], {"prompt_token_ids": [100]}, {"prompt": "e"}]
    answers = llm.generate(prompts, GREEDY)
    assert [answer.prompt_token_ids for answer in answers] == [[BOS, 97], [98, 99], [100], [BOS, 101]]
    assert [answer.prompt for answer in answers] == ["a", None, None, "e"]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.finished and len(answer.outputs[0].token_ids) == 8
        alone = llm.generate(prompt, GREEDY)[0]  # type: ignore[arg-type]
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids
        times = answer.metrics
        assert times.first_token_s is not None and times.finished_s is not None
        assert times.arrival_s <= times.first_token_s <= times.finished_s
    assert at_rest(llm)


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    for prompt in ("a", [97, 98], {"prompt": "a"}):
        assert len(llm.generate(prompt, GREEDY)) == 1  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    prompts = [[letter, letter + 1] for letter in range(97, 117)]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3, n=2, ignore_eos=True))
    assert [answer.prompt_token_ids for answer in answers] == prompts
    assert all(len(made.token_ids) == 3 for answer in answers for made in answer.outputs)


def test_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["a", "a"], params)
    ids = [made.token_ids for made in first.outputs]
    assert len({tuple(i) for i in ids}) == 3
    assert [made.token_ids for made in second.outputs] == ids
    assert [made.index for made in first.outputs] == [0, 1, 2]


def test_the_same_program_gives_the_same_tokens(folder: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with LLM(folder, **ENGINE, seed=seed, generation_config="vllm") as llm:
            return [answer.outputs[0].token_ids for answer in llm.generate(["a", "a"], use_tqdm=False)]

    # Weights come from the seed too, so only its own run is its oracle.
    first = run(3)
    assert run(3) == first and first[0] != first[1]


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short, long = (SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in (1, 5))
    answers = llm.generate(["a", "b"], [short, long])
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [1, 5]
    with refuses(RequestError, "not-one-per-prompt") as refused:
        llm.generate("a", [short, long])
    assert re.search(r"\b2 sampling_params .*\b1 prompt", str(refused.value))
    with refuses(RequestError, "invalid-sampling-params") as refused:
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
    assert "'temperature'" in str(refused.value)


def test_the_models_defaults_hold_where_nothing_is_said(llm: LLM) -> None:
    params = llm.sampling_params(max_tokens=3)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 7, 3)
    # Greedy by generation_config.json, against SamplingParams' own temperature of 1.
    assert llm.generate("a")[0].outputs[0].token_ids == llm.generate("a")[0].outputs[0].token_ids


def test_chat(llm: LLM) -> None:
    one = llm.chat(HI, GREEDY)
    assert one[0].prompt == "<bos><s>user:hi<e><s>assistant:" and one[0].prompt_token_ids.count(BOS) == 1
    two = llm.chat([HI, HI], GREEDY, chat_template_kwargs={"shout": True})
    assert [answer.prompt for answer in two] == ["<bos><s>user:hi<e><s>assistant:LOUD"] * 2
    assert llm.chat(HI, GREEDY, chat_template="{{ messages[0].content }}!")[0].prompt == "hi!"
    with refuses(RequestError, "unknown-role"):
        llm.chat([{"role": "robot", "content": "hi"}])
    with refuses(RequestError, "messages-not-list"):
        llm.chat([])


def test_a_stream_grows_to_the_same_answer(llm: LLM) -> None:
    whole = llm.generate("a", GREEDY)[0]
    lengths = []
    for answer in llm.stream("a", GREEDY):
        lengths.append(len(answer.outputs[0].token_ids))
    assert lengths == list(range(1, 9))
    assert answer.finished and answer.outputs[0].text == whole.outputs[0].text
    assert [a.prompt for a in llm.stream(HI, GREEDY)][-1] == "<bos><s>user:hi<e><s>assistant:"


def test_streams_take_turns(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in ("a", "b")]
    streams = [llm.stream("a", GREEDY), llm.stream("b", GREEDY)]
    answers = [list(pair) for pair in zip(*streams, strict=True)][-1]
    assert [answer.outputs[0].token_ids for answer in answers] == expected


def test_a_stream_that_is_left_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("a", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert not at_rest(llm)
    stream.close()
    assert at_rest(llm)


def test_a_stop_string_ends_a_request_in_the_core(llm: LLM) -> None:
    free = llm.generate("a", SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))[0].outputs[0]
    stop = free.text[3:5]
    made = llm.generate("a", SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, stop=stop))[0].outputs[0]
    assert made.text == free.text[: free.text.index(stop)]
    assert (made.finish_reason, made.stop_reason) == ("stop", stop)
    assert len(made.token_ids) < 50 and at_rest(llm)


def test_end_tokens_end(llm: LLM) -> None:
    force = SamplingParams(max_tokens=5, allowed_token_ids=(END,))
    made = llm.generate("a", force)[0].outputs[0]
    assert (made.token_ids, made.text, made.finish_reason, made.stop_reason) == ([END], "", "stop", None)
    longer = SamplingParams(max_tokens=5, allowed_token_ids=(END,), ignore_eos=True)
    assert llm.generate("a", longer)[0].outputs[0].finish_reason == "length"


def test_logprobs(llm: LLM) -> None:
    answer = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, prompt_logprobs=1))[0]
    made = answer.outputs[0]
    assert made.logprobs is not None and made.cumulative_logprob is not None
    assert [next(iter(position)) for position in made.logprobs] == made.token_ids
    assert all(
        len(position) == 3 and position[token].rank == 1
        for position, token in zip(made.logprobs, made.token_ids, strict=True)
    )
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 3
    assert answer.prompt_logprobs[0] is None and 97 in (answer.prompt_logprobs[1] or {})


def test_a_bad_request_leaves_nothing_behind(llm: LLM) -> None:
    bad: list[Any] = ["x" * 64, [9999], [[]], 5, ["a", "x" * 64], ["a", 5], {"text": "a"}]
    for prompt in bad:
        with pytest.raises(RequestError):
            llm.generate(prompt, GREEDY)
    assert at_rest(llm) and llm.generate("a", GREEDY)[0].finished


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_generate_leaves_nothing_behind(llm: LLM, error: type[BaseException]) -> None:
    class Bar:
        def __init__(self, **said: object) -> None: ...

        def update(self, n: int) -> None:
            raise error

        def close(self) -> None: ...

    with pytest.raises(error):
        llm.generate(["a", "b", "c"], [GREEDY, SamplingParams(max_tokens=40), GREEDY], use_tqdm=Bar)
    assert at_rest(llm) and llm.generate("a", GREEDY)[0].finished


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_a_step_is_handed_over_loses_none(llm: LLM, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A step that the ranks know of and the core does not would be waited for for ever by the next request."""
    assert llm._engine is not None
    executor = llm._engine._executor
    submit, steps = executor.submit, count(1)

    def interrupted(step: StepPlan) -> Future[StepResult]:
        third = next(steps) == 3
        if third and when == "before":
            signal.raise_signal(signal.SIGINT)
        future = submit(step)
        if third and when == "after":
            signal.raise_signal(signal.SIGINT)
        return future

    want = llm.generate(["a", "b"], GREEDY)
    monkeypatch.setattr(executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    assert at_rest(llm)
    got = llm.generate(["a", "b"], GREEDY)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert at_rest(llm)


def test_progress_is_shown_where_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    seen: list[Any] = []

    class Bar:
        def __init__(self, **said: object) -> None:
            seen.append(said["total"])

        def update(self, n: int) -> None:
            seen.append(n)

        def close(self) -> None:
            seen.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert seen == [2, 1, 1, "closed"]
    llm.generate("a", GREEDY)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    llm.generate("a", GREEDY)
    out, err = capfd.readouterr()
    assert out == "" and "1/1" in err


def test_start_says_what_it_holds_and_not_on_stdout(folder: Path, caplog: Any, capfd: Any) -> None:
    with caplog.at_level(logging.INFO, logger="weft"), LLM(folder, **ENGINE) as llm:
        assert llm.plan.max_model_len == 64 and llm.num_blocks > 0
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("CPU KV cache size: ") for line in lines)
    assert any(line.startswith("Maximum concurrency for 64 tokens per request: ") for line in lines)
    assert capfd.readouterr().out == ""


def test_without_a_tokenizer(folder: Path) -> None:
    with LLM(folder, **ENGINE, skip_tokenizer_init=True) as llm:
        answer = llm.generate([97, 98], GREEDY)[0]
        assert answer.outputs[0].text == "" and len(answer.outputs[0].token_ids) == 8
        for ask in (lambda: llm.generate("a"), lambda: llm.chat(HI), llm.get_tokenizer):
            with refuses(RequestError, "tokenizer-missing"):
                ask()


def test_layouts_give_the_same_tokens(folder: Path, llm: LLM) -> None:
    expected = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    said: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
        {"tensor_split": [1, 1], "executor": "inline"},
        {"pipeline_split": [1, 1], "executor": "inline"},
        {"tensor_parallel_size": 2},  # processes
    ]
    for layout in said:
        with LLM(folder, **ENGINE, **layout) as other:
            assert len(other.plan.places) == 2
            assert other.generate("abc", GREEDY)[0].outputs[0].token_ids == expected, layout


def test_an_engine_ends_once_and_says_so(folder: Path) -> None:
    llm = LLM(folder, **ENGINE)
    llm.shutdown()
    llm.shutdown()
    with refuses(RequestError, "engine-closed"):
        llm.generate("a")


# Arguments


def test_arguments_as_python_says_them(folder: Path, caplog: Any) -> None:
    with LLM(
        folder,
        **{**ENGINE, "dtype": torch.float32},
        tensor_parallel_size=None,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        trust_remote_code=True,
        swap_space=4,
    ) as llm:
        assert (llm.config.dtype, llm.config.gpu_memory_utilization) == ("float32", (0.5,))
    assert logged(caplog, "argument-ignored") == [{"name": "swap_space"}]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ({"tensor_paralel_size": 2}, "unknown-argument", "did you mean 'tensor_parallel_size'"),
        ({"tp": 2}, "unknown-argument", "did you mean 'tensor_parallel_size'"),
        ({"zzz": 2}, "unknown-argument", "'zzz'"),
        ({"max_model_len": "long"}, "invalid-argument", "`max_model_len`"),
        ({"max_model_len": 0}, "below-minimum", "max_model_len"),
        ({"tensor_split": [1, "x"]}, "invalid-argument", "tensor_split[1]"),
        ({"distributed_executor_backend": "dask"}, "unknown-choice", "dask"),
        ({"dtype": "float8"}, "unknown-choice", "float8"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_line(folder: Path, arguments: dict[str, Any], code: str, value: str) -> None:
    with refuses(ConfigError, code) as caught:
        LLM(folder, **{**ENGINE, **arguments})
    assert value in str(caught.value) and "\n" not in str(caught.value)


def test_a_failed_start_leaves_no_thread(tmp_path: Path) -> None:
    bad = tiny.write(tmp_path / "tiny")
    (bad / "tokenizer.json").write_text("{")
    before = set(threading.enumerate())
    with pytest.raises(ModelError):
        LLM(bad, **ENGINE)
    assert set(threading.enumerate()) == before
