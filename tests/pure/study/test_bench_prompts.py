"""Requests that a benchmark sends to a server, and their times."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.errors import ConfigError
from weft.study.bench.arrivals import arrival_times
from weft.study.bench.prompts import BenchPrompt, length_range, random_prompts, read_prompts


@given(seed=st.integers(0, 99), rate=st.floats(0.1, 100), shape=st.floats(0.2, 20))
def test_arrivals(seed: int, rate: float, shape: float) -> None:
    due = arrival_times(seed, count=50, rate=rate, burstiness=shape)
    assert due == sorted(due) == arrival_times(seed, count=50, rate=rate, burstiness=shape)
    assert arrival_times(seed, count=50, rate=inf) == [0.0] * 50


def test_arrivals_have_their_rate_and_burstiness() -> None:
    for shape in (0.5, 1.0, 10.0):
        due = arrival_times(0, count=20_000, rate=8.0, burstiness=shape)
        gaps = np.diff([0.0, *due])
        assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / shape, rel=0.1)


@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, 40),
    ratio=st.floats(0, 0.99),
    prefix=st.integers(0, 20),
    vocab=st.one_of(st.none(), st.integers(1, 99)),
)
def test_random_prompts(seed: int, length: int, ratio: float, prefix: int, vocab: int | None) -> None:
    low, high = length_range(length, ratio)
    assert 1 <= low <= length <= high

    def draw() -> list[BenchPrompt]:
        return random_prompts(seed, count=3, vocab=vocab, input_len=(low, high), output_len=(1, 5), prefix_len=prefix)

    prompts = draw()
    assert prompts == draw()
    parts = [it.content.split() if isinstance(it.content, str) else it.content for it in prompts]
    assert all(low + prefix <= len(part) <= high + prefix for part in parts)
    assert len({tuple(part[:prefix]) for part in parts}) == 1
    assert all(isinstance(it.content, list) == (vocab is not None) for it in prompts)


def test_prompts_from_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "one", "output_tokens": 5},
        {"prompt": [1, 2]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 7},
    ]
    lines.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_prompts(str(lines), output_len=9) == [
        BenchPrompt("one", 5),
        BenchPrompt([1, 2], 9),
        BenchPrompt([{"role": "user", "content": "x"}], 7),
    ]
    shared = tmp_path / "sharegpt.json"
    talks = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"conversations": []},
    ]
    shared.write_text(json.dumps(talks))
    assert read_prompts(str(shared), output_len=9) == [BenchPrompt("hi", 9)]


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("", "dataset-without-prompts", ()),
        ("[]", "dataset-without-prompts", ()),
        ("{nonsense", "dataset-not-json", ("line 1",)),
        ('{"prompt": "a"}\n[1]', "dataset-line-without-prompt", ("line 2",)),
        ('{"prompt": ""}', "dataset-line-without-prompt", ("line 1",)),
        ('{"prompt": []}', "dataset-line-without-prompt", ("line 1",)),
        ('{"prompt": [1, "a"]}', "dataset-line-without-prompt", ("line 1",)),
        ('{"prompt": [-1]}', "dataset-line-without-prompt", ("line 1",)),
        ('{"prompt": [true]}', "dataset-line-without-prompt", ("line 1",)),
        ('{"prompt": "a", "output_tokens": 0}', "bad-output-length", ("0",)),
        ('{"prompt": "a", "output_tokens": "9"}', "bad-output-length", ("'9'",)),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, text: str, code: str, values: tuple[str, ...]) -> None:
    path = tmp_path / "it.jsonl"
    path.write_text(text)
    with refuses(ConfigError, code, *values):
        read_prompts(str(path), output_len=4)
    with refuses(ConfigError, "cannot-read-dataset"):
        read_prompts(str(tmp_path / "none"), output_len=4)
