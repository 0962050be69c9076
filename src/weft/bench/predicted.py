"""What the planner expected of a batch that was measured: the same figures, so that they can stand side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING

from weft.bench.workload import BenchRequest

if TYPE_CHECKING:
    from weft.planner.forecast import Forecast

# Figures that are predicted, as reports have them: how a person calls them, in what unit, and how many make one.
FIGURES = {
    "ttft_s": ("time to first token", "ms", 1e3),
    "decode_tok_s": ("of a request after it", "tokens/s", 1.0),
    "output_tok_s": ("output of all", "tokens/s", 1.0),
}


def predict_batch(forecast: Forecast, asks: Sequence[BenchRequest]) -> dict[str, float]:
    """Of requests that are all there at the start: medians of the first two figures, under the names of FIGURES."""
    plan, count = forecast.plan, len(asks)
    input_len, output_len = fmean(len(ask.prompt) for ask in asks), fmean(ask.output_len for ask in asks)
    speed = forecast.speed(input_len, output_len, count)
    # Prompts are read in steps of so many; who is in the middle has waited for its step and those before.
    each = max(1, int(plan.max_num_batched_tokens // input_len))
    read = min(count, ceil(ceil(count / 2) / each) * each)
    # After its first token a request waits for those prompts only that are read in later steps.
    later = speed.prefill_s * (count - read) / output_len
    round_s = speed.step.total
    alone_s = speed.ttft_s + (read - 1) * speed.prefill_s
    whole_s = (
        alone_s + speed.prefill_s * (count - read) + (output_len - 1) * round_s * max(1.0, count / speed.concurrency)
    )
    return {
        "ttft_s": round(alone_s, 5),
        "decode_tok_s": round(1 / (round_s + later), 2),
        "output_tok_s": round(count * output_len / whole_s, 2),
    }


def comparison_lines(measured: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """A line for each figure: as measured, as predicted, and the ratio of the two."""
    lines = []
    for name, (words, unit, scale) in FIGURES.items():
        real, planned = measured[name] * scale, expected[name] * scale
        if real > 0 and planned > 0:
            lines.append(f"{words}: {real:,.1f} {unit}, predicted {planned:,.1f}, ratio {real / planned:.2f}")
    return lines
