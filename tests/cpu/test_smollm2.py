"""The real model: SmolLM2-135M-Instruct from its GGUF file, in fp32, token by token as Transformers has it.

Its answers are kept in tests/data/smollm2_answers.json: Transformers takes half a minute to read the file, and does it
in the long test alone, which compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cpu.layouts import plan_for
from weft import LLM, SamplingParams
from weft.checkpoint.hub.demo import fetch_demo

NEW = 32
KEPT = Path(__file__).parents[1] / "data/smollm2_answers.json"
PROMPTS = [
    "Why is the sky blue?",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "In 1969, 42 people counted to 31415 and",
    "La capitale de la France est 🗼",
]


@pytest.fixture(scope="module")
def gguf() -> Path:
    return Path(fetch_demo())


@pytest.fixture(scope="module")
def ids(gguf: Path) -> list[list[int]]:
    from weft.engine.text import tokenizer

    words = tokenizer.load_tokenizer(str(gguf))
    return [words.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """Greedy answers to the prompts."""
    kept: list[list[int]] = json.loads(KEPT.read_text())
    return kept


@pytest.mark.long
def test_transformers_chooses_the_kept_answers(gguf: Path, ids: list[list[int]], answers: list[list[int]]) -> None:
    """It reads and dequantises the same file by its own code."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.eval()
    # The file says 1e-05; older conversions in Transformers leave the default of LlamaConfig.
    assert model.config.rms_norm_eps == pytest.approx(1e-5)
    for prompt, answer in zip(ids, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        # In the place of each token, after those before it.
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def seldom(**layout: Any) -> Any:
    """A layout of the long tests."""
    return pytest.param(layout, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        seldom(tensor_parallel_size=2, executor="inline"),
        {"tensor_parallel_size": 2, "executor": "processes"},
        seldom(tensor_parallel_size=3, executor="inline"),
        seldom(pipeline_parallel_size=2, executor="processes"),
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(
    ids: list[list[int]], answers: list[list[int]], layout: dict[str, Any]
) -> None:
    with LLM("demo", dtype="float32", max_model_len=512, **layout) as llm:
        outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True), use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == answers
    assert all(len(answer) == NEW for answer in answers)


def test_two_ranks_hold_six_and_three_heads() -> None:
    places = plan_for(Path(fetch_demo()), "tp2", max_model_len=512).places
    assert [len(place.q_heads) for place in places] == [6, 3]
    assert [len(place.kv_heads) for place in places] == [2, 1]
