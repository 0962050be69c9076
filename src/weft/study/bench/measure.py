"""One run of a workload on an engine, measured in seconds and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from weft.engine.core.params import SamplingParams
from weft.errors import ConfigError
from weft.study.bench.workload import BenchRequest

if TYPE_CHECKING:
    from weft.engine.llm import LLM


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. `ttft_s` and `tpot_s` are medians over its requests: seconds from submission to the first
    token, and per token after it. `seconds` is from the submission of all requests to the end of the last one."""

    seconds: float
    ttft_s: float
    tpot_s: float
    input_tokens: int
    output_tokens: int

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second of one request after its first token."""
        return 1 / self.tpot_s if self.tpot_s else 0.0

    @property
    def output_tok_s(self) -> float:
        """Output tokens per second of all requests together."""
        return self.output_tokens / self.seconds


def run_batch(llm: LLM, requests: Sequence[BenchRequest]) -> RunFigures:
    """Submit all requests at once and wait for the last one. Raises ConfigError if one ends too early."""
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    params = [
        SamplingParams(temperature=request.temperature, max_tokens=request.output_len, ignore_eos=True)
        for request in requests
    ]
    start = time.monotonic()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - start
    ttfts, tpots, output_tokens = [], [], 0
    for request, answer in zip(requests, answers, strict=True):
        generated, times = len(answer.outputs[0].token_ids), answer.metrics
        assert times.first_token_s is not None and times.finished_s is not None
        if generated != request.output_len:
            raise ConfigError(
                f"a request ended after {generated} of {request.output_len} tokens: {len(request.prompt)} + "
                f"{request.output_len} tokens are more than --max-model-len",
                code="request-ended-early",
            )
        output_tokens += generated
        ttfts.append(times.first_token_s - times.arrival_s)
        if generated > 1:
            tpots.append((times.finished_s - times.first_token_s) / (generated - 1))
    return RunFigures(
        seconds=seconds,
        ttft_s=median(ttfts),
        tpot_s=median(tpots) if tpots else 0.0,
        input_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=output_tokens,
    )


def median_figures(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Median of each figure over the runs."""
    return {
        "ttft_s": round(median(run.ttft_s for run in runs), 5),
        "tpot_s": round(median(run.tpot_s for run in runs), 6),
        "decode_tok_s": round(median(run.decode_tok_s for run in runs), 2),
        "output_tok_s": round(median(run.output_tok_s for run in runs), 2),
        "total_tok_s": round(median((run.input_tokens + run.output_tokens) / run.seconds for run in runs), 2),
        "seconds": round(median(run.seconds for run in runs), 4),
    }
