"""Guessed tokens: the same answers, greedy and sampled, in fewer steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch
from msgspec.structs import replace

from tests.cpu import checkpoints
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.checkpoint import resolve
from weft.config import EngineConfig
from weft.engine.core import kv
from weft.engine.core.speculation import DraftProposer
from weft.engine.core.speculation_gate import SpeculationGate
from weft.errors import ConfigError, PlanError
from weft.machine.hardware import host
from weft.plan.memory import fit_length
from weft.plan.plan import Plan, named_devices
from weft.plan.speculation import draft_plan
from weft.planner.execution.execution import plan_to_run
from weft.ranks.comm import Links
from weft.ranks.kernels.batch import Batch
from weft.ranks.models.decoder import DecoderModel
from weft.ranks.worker.runner import ModelRunner, Rehearse
from weft.ranks.worker.sampler import Sampler
from weft.ranks.worker.worker import Worker

PROMPTS = [[1, 5, 9, 33, 7], [40, 41, 42] * 9, [1, 150], list(range(3, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, logprobs=1)
MIXED = [GREEDY, DRAWN, SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=12, ignore_eos=True), DRAWN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(checkpoints.make("llama", folder))


def run(model: str, **how: object) -> tuple[list, object]:
    with LLM(model, dtype="float32", skip_tokenizer_init=True, executor="inline", **how) as llm:
        answers = llm.generate(PROMPTS, MIXED)
        return [(it.outputs[0].token_ids, it.outputs[0].finish_reason) for it in answers], llm.stats()


@pytest.fixture(scope="module")
def truth(model: str) -> list:
    return run(model)[0]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"max_num_batched_tokens": 12},
        {"async_scheduling": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", [False, True], ids=["ngram", "draft"])
def test_the_same_answers(model: str, truth: list, layout: dict, draft: bool) -> None:
    # A model that drafts for itself guesses everything right.
    config = {"model": model, "num_speculative_tokens": 3} if draft else {"method": "ngram", "prompt_lookup_min": 1}
    found, stats = run(model, speculative_config=config, **layout)
    assert found == truth
    if draft:
        # What is asked for is bounded by the blocks that a text has: nearly all the rest is right.
        assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 40
    else:
        assert stats.draft_tokens > 0


def test_a_draft_that_guesses_badly_changes_nothing(model: str, truth: list, folder: Path) -> None:
    other = checkpoints.make("llama-mha-odd", folder)
    found, stats = run(model, speculative_config={"model": str(other)})
    assert found == truth
    assert stats.draft_tokens > 0 and stats.accepted_tokens < stats.draft_tokens


def test_a_draft_forgets_what_it_guessed_wrong(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", "block_size": 4}
    with LLM(model, **how) as llm:
        want = llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids
    judged: list[tuple[int, int]] = []
    monkeypatch.setattr(
        DraftProposer, "record_accepted", lambda self, guessed, confirmed: judged.append((guessed, confirmed))
    )
    with LLM(model, speculative_config={"model": model, "num_speculative_tokens": 3}, **how) as llm:
        logits, calls = DecoderModel.logits, count()

        def at_first_wrong(self: DecoderModel, hidden: torch.Tensor) -> torch.Tensor | None:
            found = logits(self, hidden)
            drafts = sys._getframe(2).f_code.co_filename.endswith("model_proposer.py")
            return -found if drafts and next(calls) < 12 and found is not None else found

        monkeypatch.setattr(DecoderModel, "logits", at_first_wrong)
        guesses_when(monkeypatch, lambda step: step < 4 or step > 8)  # some guesses are not judged, and then it rests
        assert llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids == want
    wrong = [step for step, (guessed, confirmed) in enumerate(judged) if confirmed < guessed]
    assert wrong == [0, 1, 2] and len(judged) > 6


def test_a_prefix_that_is_found_is_found_by_the_draft_too(model: str, reads: list[int]) -> None:
    config = {"model": model, "num_speculative_tokens": 3}
    how = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", "block_size": 4}
    with LLM(model, **how) as llm:
        want = [it.outputs[0].token_ids for it in llm.generate(PROMPTS, GREEDY)]
    with LLM(model, speculative_config=config, **how) as llm:
        llm.generate(PROMPTS, GREEDY)
        before = llm.stats()
        reads.clear()
        again = llm.generate(PROMPTS, GREEDY)
        after = llm.stats()
    assert [it.outputs[0].token_ids for it in again] == want and again[3].num_cached_tokens > 30
    right, all_ = (getattr(after, name) - getattr(before, name) for name in ("accepted_tokens", "draft_tokens"))
    assert right > 0.9 * all_ > 0
    # Of the prompts what is no whole block, and of the answers each token.
    assert sum(reads) < 4 * (4 + 30 + 1)


def test_a_draft_reads_once_what_texts_have_in_common(model: str, reads: list[int]) -> None:
    how = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", "block_size": 4}
    prompts = [[*range(50, 90), last] for last in range(4)]
    with LLM(model, speculative_config={"model": model}, **how) as llm:
        reads.clear()
        llm.generate(prompts, replace(GREEDY, max_tokens=4))
    assert reads[0] == 40 + 4 * 2


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step of a draft."""
    seen: list[int] = []

    def forward(self: ModelRunner, batch: Batch, incoming: torch.Tensor | None = None) -> torch.Tensor:
        if self.plan.speculation is None:
            seen.append(len(batch.tokens))
        return whole(self, batch, incoming)

    whole = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", forward)
    return seen


def guesses_when(monkeypatch: pytest.MonkeyPatch, turns: Callable[[int], bool]) -> None:
    """Guess in those steps alone, whatever the clock says."""
    steps = count()
    monkeypatch.setattr(SpeculationGate, "allows_drafts", lambda self, rows: turns(next(steps)))


OFTEN = {
    "now and then": lambda step: step % 7 > 3,
    "seldom": lambda step: step % 19 > 15,
    "late": lambda step: step > 15,
    "at random": lambda step: Random(step).random() < 0.4,
}


@pytest.mark.parametrize("turns", OFTEN.values(), ids=OFTEN.keys())
@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 16},
        {"kv_cache_memory_bytes": 300_000, "max_model_len": 72},
        {"pipeline_parallel_size": 2, "max_num_seqs": 3},
    ],
    ids=["chunks", "preempted", "stages"],
)
def test_a_draft_reads_what_it_missed(
    model: str, monkeypatch: pytest.MonkeyPatch, turns: Callable[[int], bool], limits: dict
) -> None:
    """It drafts for itself, so with the KV of all tokens before it is always right: with found blocks that it has not
    read, with blocks that others had, where its guesses were not taken up."""
    monkeypatch.setattr(kv, "GROWTH", 1)
    prompts = [*PROMPTS, list(range(3, 44)), list(range(3, 30)), [1, 5, 9, 33, 7, 8]]
    params = [GREEDY, replace(DRAWN, seed=9), GREEDY, replace(DRAWN, logprobs=None), DRAWN, GREEDY, DRAWN]
    how = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", "block_size": 4, **limits}
    with LLM(model, **how) as llm:
        want = [[it.outputs[0].token_ids for it in llm.generate(prompts, params)] for _ in range(2)]
    guesses_when(monkeypatch, turns)
    with LLM(model, speculative_config={"model": model, "num_speculative_tokens": 3}, **how) as llm:
        found = [[it.outputs[0].token_ids for it in llm.generate(prompts, params)] for _ in range(2)]
        stats = llm.stats()
    assert found == want and bool(stats.preemptions) == ("max_model_len" in limits)
    assert stats.draft_tokens > 10 and stats.accepted_tokens == stats.draft_tokens


def test_prepared_batches_are_sampled(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU hears of an admission with the next batch, and a draft reads prompts too, from which nobody samples yet."""
    calls: list[str] = []

    def counted(name: str) -> None:
        whole = getattr(Sampler, name)
        monkeypatch.setattr(Sampler, name, lambda *given: calls.append(name) or whole(*given))

    how = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", "max_num_batched_tokens": 16}
    with LLM(model, speculative_config={"model": model}, **how) as llm:
        counted("prepare_batch")
        counted("sample")
        llm.generate([list(range(3, 44))], GREEDY)
    assert (
        calls[::2] == ["prepare_batch"] * (len(calls) // 2) and calls[1::2] == ["sample"] * (len(calls) // 2) and calls
    )


def test_a_draft_that_is_not_asked_reads_nothing(model: str, monkeypatch: pytest.MonkeyPatch, reads: list[int]) -> None:
    how = {"dtype": "float32", "skip_tokenizer_init": True, "executor": "inline", "max_num_batched_tokens": 32}
    with LLM(model, speculative_config={"model": model}, **how) as llm:
        guesses_when(monkeypatch, lambda step: False)
        reads.clear()
        llm.generate(PROMPTS, GREEDY)
        assert reads == []
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2))
        guesses_when(monkeypatch, lambda step: True)
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2))
        assert reads == [], "nobody can use a guess of what comes after the last token"
        llm.generate(PROMPTS, GREEDY)
        assert reads and max(reads) <= 32, "no more than a step may have"


@pytest.mark.parametrize(
    ("config", "code", "value"),
    [
        ({"method": "medusa"}, "unknown-speculative-method", "ngram, draft_model"),
        ({"method": "draft_model"}, "speculative-model-mismatch", "draft_model needs"),
        ({"method": "ngram", "model": "x"}, "speculative-model-mismatch", "ngram has no"),
        ({"metod": "ngram"}, "unknown-speculative-field", "'metod'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative-value-out-of-range", "1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "speculative-value-out-of-range", "1 to 16"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "lookup-min-above-max", "5"),
        ({"method": "ngram", "prompt_lookup_min": "5"}, "speculative-value-out-of-range", "1 to 32"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_before_anything_starts(
    model: str, config: dict, code: str, value: str
) -> None:
    with refuses(ConfigError, code, value):
        LLM(model, skip_tokenizer_init=True, speculative_config=config)


def test_a_draft_of_another_vocabulary_is_refused(model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))
    with refuses(ConfigError, "draft-of-other-vocabulary", tmp_path):
        LLM(model, load_format="dummy", skip_tokenizer_init=True, speculative_config={"model": str(tmp_path)})


def drafted(model: str, **how: object) -> Plan:
    config = EngineConfig(model=model, dtype="float32", speculative_config={"model": model}, **how)
    return plan_to_run(config, resolve(model), host.probe_host())


def test_graphs_of_the_draft_stay_beside_those_of_its_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: ModelRunner, rehearse: Rehearse) -> None:
        draft = self.plan.speculation is None
        self.graph_bytes, self.activation_bytes = (30, 5000) if draft else (100, 1000)

    monkeypatch.setattr(ModelRunner, "measure", measured)
    capacity = Worker(drafted(model), 0, Links()).load()
    assert capacity.activation_bytes == 5000 + 130


def test_the_draft_s_gpu_is_that_of_the_output_rank(model: str) -> None:
    """By name as well, or its worker takes the first rank's for its own and finds CUDA's order wrong."""
    plan = drafted(model, pipeline_parallel_size=2)
    plan = replace(plan, devices=named_devices("cuda:0", "cuda:1"), uuids=("GPU-00", "GPU-11"))
    draft = draft_plan(plan)
    assert (draft.devices, draft.uuids) == (named_devices("cuda:1"), ("GPU-11",))
    assert draft_plan(drafted(model)).uuids == ()  # on a CPU


def test_the_memory_that_a_length_needs_counts_the_draft(model: str) -> None:
    plan = drafted(model, max_model_len=100)
    with refuses(
        PlanError, "context-exceeds-kv-cache", f"--kv-cache-memory-bytes {7 * 2 * plan.block_bytes(0)} per rank"
    ):
        fit_length(plan, 3)
