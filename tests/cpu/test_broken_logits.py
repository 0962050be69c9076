"""Checkpoints whose numbers are not: NaN weights stop the start, NaN of one prompt ends that request and no other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cpu import checkpoints
from tests.refusals import refuses
from weft import LLM
from weft.engine.core.params import SamplingParams
from weft.errors import EngineError, OutputError

HURT = 7  # the token whose embedding is NaN
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 130_000,
}  # of few blocks
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)


def with_nan(path: Path, name: str, rows: int | slice) -> Path:
    """The checkpoint with NaN in rows of a tensor."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name][rows] = math.nan
    save_file(tensors, file, {"format": "pt"})
    return path


@pytest.mark.parametrize("how", [{}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}], ids=["one", "four"])
def test_a_checkpoint_of_nan_does_not_start(how: dict[str, Any], tmp_path: Path) -> None:
    path = with_nan(checkpoints.make("llama", tmp_path), "model.layers.0.mlp.down_proj.weight", slice(None))
    rank = 2 if how else 0
    with refuses(EngineError, "nan-logits") as caught:
        LLM(str(path), executor="inline", **how, **COMMON)
    cause = caught.value.cause
    assert (cause.rank, cause.phase) == (rank, "allocate") and str(path) in cause.cause


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_one_request_with_nan_harms_no_other(backend: str, tmp_path: Path) -> None:
    """Neither those beside it nor those that get its slot and its KV blocks."""
    path = checkpoints.make("llama", tmp_path)
    prompts = [[3, 4, 5], [6, HURT, 9], [8, 9]]

    def answers() -> list[Any]:
        with LLM(str(path), executor="inline", attention_backend=backend, max_num_seqs=3, **COMMON) as llm:
            outputs = llm.generate(prompts, GREEDY) + llm.generate([[5, 4], [4, 4, 4, 4], [9]], GREEDY)
            return [output.outputs[0] for output in outputs]

    clean = answers()
    with_nan(path, "model.embed_tokens.weight", HURT)
    # A sampled token whose embedding is NaN would end others as well.
    assert all(HURT not in choice.token_ids for choice in clean[:1] + clean[2:])
    hurt = answers()
    assert hurt[1].finish_reason == "error" and hurt[1].token_ids == []
    assert [c.token_ids for c in hurt[:1] + hurt[2:]] == [c.token_ids for c in clean[:1] + clean[2:]]


def test_broken_logits_are_told_with_the_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = with_nan(checkpoints.make("llama", tmp_path), "model.embed_tokens.weight", HURT)
    with LLM(str(path), executor="inline", tensor_parallel_size=2, **COMMON) as llm:
        with refuses(OutputError, "nan-logits") as caught:
            list(llm.stream([3, HURT], GREEDY))
        assert str(caught.value).startswith("rank 0: ") and str(caught.value) in caplog.text
        assert len(llm.generate([[3, 4]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_steps_ahead_and_guesses_go_on(tmp_path: Path) -> None:
    """The id in place of the token is one that the next step may look up."""
    path = with_nan(checkpoints.make("llama", tmp_path), "model.embed_tokens.weight", HURT)
    more: list[dict[str, Any]] = [
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"speculative_config": {"model": str(path), "num_speculative_tokens": 2}},
    ]
    for how in more:
        with LLM(str(path), executor="inline", **COMMON, **how) as llm:
            made = llm.generate([[3, HURT, 3], [3, 4, 3, 4, 3]], GREEDY, use_tqdm=False)
            assert [output.outputs[0].finish_reason for output in made] == ["error", "length"], how
