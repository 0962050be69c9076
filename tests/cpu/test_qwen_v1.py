"""Qwen v1, which Transformers does not have: logits and tokens of the reference in every layout and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.layouts import LAYOUTS, logits_of, plan_for
from tests.cpu.qwen_v1 import Reference, write
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.quantised.precision import weight_bytes
from weft.engine.core import kv
from weft.errors import ConfigError, ModelError

PROMPTS = [[1, 5, 9, 33, 7], list(range(3, 60)), [1, 150], [40, 41, 42] * 9]
NEW = 12
LONGEST = 100  # tokens: three times as many as a stretched model was trained at


@pytest.fixture(scope="module", params=["trained", "stretched"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the engine's settings for it: within the length that it was trained at, or beyond."""
    folder = tmp_path_factory.mktemp("qwen") / request.param
    if request.param == "trained":
        return write(folder), {}
    return write(folder, seq_length=32), {"max_model_len": LONGEST}


@pytest.fixture(scope="module")
def truth(model: tuple[Path, dict[str, Any]]) -> list[list[int]]:
    reference = Reference(model[0], LONGEST)
    return [reference.greedy(prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_agree_in_every_layout(model: tuple[Path, dict[str, Any]], layout: str) -> None:
    path, config = model
    exact = Reference(path, LONGEST).logits(PROMPTS[1])
    got = logits_of(plan_for(path, layout, dtype="float32", **config), PROMPTS[1]).numpy()
    assert np.abs(got - exact).max() <= 1e-4 * exact.std()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_planner_counts_every_byte(model: tuple[Path, dict[str, Any]], layout: str) -> None:
    plan = plan_for(model[0], layout, dtype="bfloat16")
    for place in plan.places:
        assert weight_bytes(plan.shape, "bf16", place) == plan.weight_bytes(place.rank)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("whole", "tp 2:1", "tp2 x pp2")))
        for name in LAYOUTS  # their logits are tested in every one
    ],
)
def test_greedy_tokens_equal_in_every_layout(
    model: tuple[Path, dict[str, Any]], truth: list[list[int]], layout: str
) -> None:
    assert tokens(model, **LAYOUTS[layout])[0] == truth


@pytest.mark.parametrize(
    "how",
    [{"max_num_batched_tokens": 7}, {"max_num_seqs": 1}, {"attention_backend": "torch"}, {"async_scheduling": True}],
    ids=str,
)
def test_tokens_do_not_depend_on_scheduling(
    model: tuple[Path, dict[str, Any]], truth: list[list[int]], how: dict[str, Any]
) -> None:
    first, again = tokens(model, again=True, **how)
    assert first == again == truth


def test_a_preempted_request_gives_the_same_tokens(
    model: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "GROWTH", 1)
    path, config = model
    plan = plan_for(path, "whole", dtype="float32", block_size=2, **config)
    length = config.get("max_model_len", 70)
    blocks = plan.kv_layout.blocks(length) + 1
    small = {"kv_cache_memory_bytes": blocks * plan.block_bytes(0), "max_model_len": length, "block_size": 2}
    # Two prompts fit together, but not with their answers.
    prompts = [list(range(first, first + length // 2 - 4)) for first in (3, 90)]
    reference = Reference(path, LONGEST)
    expected = [reference.greedy(prompt, NEW) for prompt in prompts]
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **small) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
        assert llm.stats().preemptions
    assert [output.outputs[0].token_ids for output in outputs] == expected


def tokens(
    model: tuple[Path, dict[str, Any]], *, again: bool = False, **how: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Continuations of PROMPTS, and with `again` those that begin with cached prefixes."""
    path, config = model
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **config, **how) as llm:
        runs = [llm.generate(PROMPTS, params) for _ in range(1 + again)]
    assert not again or runs[1][1].num_cached_tokens >= 48
    first, *second = [[output.outputs[0].token_ids for output in run] for run in runs]
    return first, second[0] if again else []


def test_lengths_are_the_trained_one_and_beyond_it_the_stretched_one(tmp_path: Path) -> None:
    path = write(tmp_path / "stretched", seq_length=32)
    assert plan_for(path, "whole").max_model_len == 32
    assert plan_for(path, "whole", max_model_len=128).max_model_len == 128
    with refuses(ConfigError, "beyond-model-length", "129", "128"):
        plan_for(path, "whole", max_model_len=129)
    fixed = write(tmp_path / "fixed", seq_length=32, use_dynamic_ntk=False)
    with refuses(ConfigError, "beyond-model-length", "33", "32"):
        plan_for(fixed, "whole", max_model_len=33)


@pytest.mark.parametrize(
    ("field", "value"), [("no_bias", False), ("rotary_pct", 0.25), ("hidden_act", "relu"), ("intermediate_size", 300)]
)
def test_what_is_not_computed_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = write(tmp_path / "model", **{field: value})
    code = "tensor-of-other-dims" if field == "intermediate_size" else "wrong-field-value"
    with refuses(ModelError, code, str(path)):
        resolve(str(path))
