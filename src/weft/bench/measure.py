"""Measuring an engine: one run of a workload, as seconds and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from weft.bench.workload import BenchRequest
from weft.core.params import SamplingParams
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.llm import LLM


class BatchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `ttft_s` and `tpot_s` are medians over its requests: seconds from submission to the first
    token, and per token after it. `seconds` is from the submission of all to the end of the last."""

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


def run_batch(llm: LLM, asks: Sequence[BenchRequest]) -> BatchRun:
    """Submit everything at once, wait for the end, and look at each request's times."""
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    params = [SamplingParams(temperature=a.temperature, max_tokens=a.output_len, ignore_eos=True) for a in asks]
    start = time.monotonic()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - start
    first, after, tokens = [], [], 0
    for ask, answer in zip(asks, answers, strict=True):
        made, times = len(answer.outputs[0].token_ids), answer.metrics
        assert times.first_token_s is not None and times.finished_s is not None
        if made != ask.output_len:
            raise ConfigError(
                f"an answer ended after {made} of {ask.output_len} tokens: {len(ask.prompt)} + {ask.output_len} tokens "
                "are more than --max-model-len"
            )
        tokens += made
        first.append(times.first_token_s - times.arrival_s)
        if made > 1:
            after.append((times.finished_s - times.first_token_s) / (made - 1))
    return BatchRun(
        seconds=seconds,
        ttft_s=median(first),
        tpot_s=median(after) if after else 0.0,
        input_tokens=sum(len(ask.prompt) for ask in asks),
        output_tokens=tokens,
    )


def median_figures(runs: Sequence[BatchRun]) -> dict[str, float]:
    """The median of each figure over the runs."""
    return {
        "ttft_s": round(median(r.ttft_s for r in runs), 5),
        "tpot_s": round(median(r.tpot_s for r in runs), 6),
        "decode_tok_s": round(median(r.decode_tok_s for r in runs), 2),
        "output_tok_s": round(median(r.output_tok_s for r in runs), 2),
        "total_tok_s": round(median((r.input_tokens + r.output_tokens) / r.seconds for r in runs), 2),
        "seconds": round(median(r.seconds for r in runs), 4),
    }
