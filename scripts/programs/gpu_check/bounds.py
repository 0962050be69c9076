"""Targets as data, and rooflines: the fastest that the card's copy bandwidth allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what is missing is named before Weft is imported
    from scripts.programs.gpu_check.shapes import Shape
    from weft.study.bench.workload import BenchRequest

ANY = ""  # a target for every card
PROFILE_BELOW = 0.75  # share of the roofline below which a kernel goes to ncu
LOWER_IS_BETTER = ("us", "ms", "s", "% idle", "errors", "graphs")


@dataclass(frozen=True)
class Target:
    """Goal of the rows that match `row`, a pattern as of file names. `card` is a word of the card's name. The goal is
    `least` in the row's unit (the most, for a unit of LOWER_IS_BETTER), or `share` of its roofline."""

    row: str
    card: str
    least: float | None = None
    share: float | None = None


TARGETS = (
    Target("Qwen3-0.6B: nano-vllm seed 0", "H200", least=24_000),
    Target("Qwen3-8B: nano-vllm seed 0", "H200", least=11_700),
    Target("Llama-3.1-8B: nano-vllm seed 0", "H200", least=12_300),
    Target("Qwen3-14B: nano-vllm seed 0", "H200", least=7_600),
    Target("Llama-3.1-8B: one request", "H200", share=0.85),
    Target("Qwen3-8B: 256 requests, Weft to vLLM", "H200", least=1.05),
    Target("Qwen3-0.6B: 256 requests, Weft to vLLM", "H200", least=1.05),
    Target("*, decode of 256 rows over *(chosen)", ANY, share=0.84),
    Target("*: chosen sizes to the fastest", ANY, least=0.97),
    Target("*: GPU idle in * steps", ANY, least=5.0),
    Target("killed rank: memory free again", ANY, least=5.0),
    Target("Llama-3.1-8B int4: start beside bfloat16", "H200", least=5.0),
)


def target_of(row: str, card: str, roofline: float | None) -> float | None:
    """The target of a row in its unit, None if there is none for this card."""
    for target in TARGETS:
        if fnmatchcase(row, target.row) and target.card in card:
            if target.share is None:
                return target.least
            return None if roofline is None else target.share * roofline
    return None


def batch_roofline(shape: Shape, asks: Sequence[BenchRequest], copy_Bps: float) -> float:
    """Output tokens/s of a dense model if all requests decode at once and each step takes as long as copying what it
    reads takes: the weights once, and the keys and values of every request's context. Prompts count nothing."""
    cached = sum(context_tokens(len(ask.prompt), ask.output_len) for ask in asks)
    steps = max(ask.output_len for ask in asks)
    seconds = (cached * shape.kv_bytes() + steps * shape.weight_bytes()) / copy_Bps
    return sum(ask.output_len for ask in asks) / seconds


def context_tokens(prompt: int, output: int) -> int:
    """Cached tokens read over the decode steps of one request: prompt + 1, prompt + 2, ... for each token but the
    first, which the prompt's step gives."""
    return (output - 1) * prompt + output * (output - 1) // 2
