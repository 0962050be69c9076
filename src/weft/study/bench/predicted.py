"""The planner's prediction for a measured batch, in the same figures, so that both can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING

from weft.study.bench.workload import BenchRequest

if TYPE_CHECKING:
    from weft.planner.execution.forecast import Forecast

# Predicted figures by their names in reports: name for people, unit, and factor from the report's unit to this one.
FIGURES = {
    "ttft_s": ("time to first token", "ms", 1e3),
    "decode_tok_s": ("of a request after it", "tokens/s", 1.0),
    "output_tok_s": ("output of all", "tokens/s", 1.0),
}


def predict_batch(forecast: Forecast, requests: Sequence[BenchRequest]) -> dict[str, float]:
    """Predict the FIGURES of requests that all arrive at the start; the first two are medians over the requests."""
    plan, count = forecast.plan, len(requests)
    input_len = fmean(len(request.prompt) for request in requests)
    output_len = fmean(request.output_len for request in requests)
    speed = forecast.speed(input_len, output_len, count)
    # A step reads this many prompts; the median request waits for its own step and for those before.
    per_step = max(1, int(plan.max_num_batched_tokens // input_len))
    read = min(count, ceil(ceil(count / 2) / per_step) * per_step)
    # After its first token a request waits only for prompts that are read in later steps.
    later = speed.prefill_s * (count - read) / output_len
    round_s = speed.step.total
    ttft_s = speed.ttft_s + (read - 1) * speed.prefill_s
    decode_s = (output_len - 1) * round_s * max(1.0, count / speed.concurrency)
    whole_s = ttft_s + speed.prefill_s * (count - read) + decode_s
    return {
        "ttft_s": round(ttft_s, 5),
        "decode_tok_s": round(1 / (round_s + later), 2),
        "output_tok_s": round(count * output_len / whole_s, 2),
    }


def comparison_lines(measured: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """A line for each figure: measured, predicted, and the ratio of the two."""
    lines = []
    for name, (words, unit, scale) in FIGURES.items():
        real, planned = measured[name] * scale, expected[name] * scale
        if real > 0 and planned > 0:
            lines.append(f"{words}: {real:,.1f} {unit}, predicted {planned:,.1f}, ratio {real / planned:.2f}")
    return lines
