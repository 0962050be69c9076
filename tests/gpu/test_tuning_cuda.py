"""Choices and compilations of a start on a GPU: sizes that are measured there, and no compiler while requests run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu import tiny
from tests.cpu.attention import shaped
from tests.log_events import logged
from weft import LLM, SamplingParams
from weft.ranks.kernels import create_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda")


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The kernels that Triton makes ready from now on, compiled or read from its cache on disk."""
    knobs = pytest.importorskip("triton", reason="needs triton").knobs
    names: list[str] = []

    def hook(**news: object) -> None:
        names.append(str(news["repr"]))

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, hook
    yield names
    knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("how", [{}, {"enforce_eager": True}, {"quantization": "int4"}], ids=str)
def test_nothing_is_compiled_while_requests_run(how: dict, compiled: list[str], tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "tiny")
    common = {"executor": "inline", "load_format": "dummy", "skip_tokenizer_init": True, "attention_backend": "triton"}
    common["max_num_seqs"] = 40
    prompts = [[1 + (7 * i + j) % 20 for j in range(1 + 9 * i)] for i in range(40)]
    asked = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(top_k=5, top_p=0.9, min_p=0.1, max_tokens=5, ignore_eos=True),
        SamplingParams(repetition_penalty=1.2, logprobs=3, prompt_logprobs=2, max_tokens=4, ignore_eos=True),
    ]
    with LLM(str(path), dtype="bfloat16", kv_cache_memory_bytes=64_000_000, **common, **how) as llm:
        assert compiled
        compiled.clear()
        for params in asked:
            for count in (1, 2, 7, 20, 40):
                llm.generate(prompts[:count], params)
    assert compiled == []


def test_sizes_are_measured_kept_and_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from weft.ranks.kernels.triton import saved_tunings
    from weft.ranks.probes import trials

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = shaped(torch.bfloat16, 128, 16, 8, rows=64, length=2048, tokens=2048)
    ran = []

    def report(what: str, times: trials.Times, obstacles: trials.Obstacles) -> None:
        ran.append(len(times))
        with capsys.disabled():
            print("\n" + what, *(f"{1e6 * took:9.1f} us  {name}" for name, took in times.items()), sep="\n  ")
            print("".join(f"  passed over: {name}: {why}\n" for name, why in obstacles.items()), end="")
        assert trials.OTHER_NUMBERS not in obstacles.values()

    found = trials.measure_tunings(shape, CUDA, report=report)
    assert len(ran) == 5 and min(ran) >= 3 and [*found.decode] == [1, 8, 64]
    saved_tunings.save_tunings(CUDA, shape, found)
    with caplog.at_level(logging.INFO, "weft"):
        attention = create_kernels("triton", CUDA, shape).attention
    assert logged(caplog, "measured-sizes")
    assert attention.tunings == found  # type: ignore[attr-defined]
