"""Composition of decode steps: the GPU's idle share, and its time by class of kernel, from torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from scripts.gpu.work import Figure

if TYPE_CHECKING:
    from weft import LLM

STEPS, ROWS, CONTEXT = 20, 256, 560
CLASSES = (  # the first whose pattern a kernel's name matches
    ("attention", r"^_(decode|prefill|join)|flash|fmha|BatchDecode|BatchPrefill"),
    ("sampling", r"^_(survey|filter|draw)"),
    ("products", r"^_multiply|gemm|gemv|nvjet|cutlass|splitK|cublas|xmma"),
    ("norms, rotation, activation", r"^_(rms_norm|silu_mul|rotate_and_store|sum_add_norm)"),
    ("copies", r"Memcpy|Memset|copy_|index|fill|CatArray|gather|scatter"),
    ("sums between ranks", r"nccl|all_reduce|one_shot|two_shot"),
)


@dataclass(frozen=True)
class Span:
    """A kernel's name, and when it began and ended, in microseconds."""

    name: str
    begin: float
    end: float


def class_of(kernel: str) -> str:
    return next((name for name, pattern in CLASSES if re.search(pattern, kernel, re.IGNORECASE)), "other")


def idle_share(spans: Iterable[Span]) -> float:
    """Share of the time from the first kernel's begin to the last one's end in which none ran."""
    ordered = sorted(spans, key=lambda span: span.begin)
    if not ordered:
        return 0.0
    busy, until = 0.0, ordered[0].begin
    for span in ordered:
        busy += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    whole = until - ordered[0].begin
    return 1 - busy / whole if whole else 0.0


def class_times(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds by class, the longest first."""
    times: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        times[class_of(span.name)] += span.end - span.begin
    return dict(sorted(times.items(), key=lambda each: -each[1]))


def profiled_steps(llm: LLM, name: str, vocab: int, *, rehearse: bool) -> Iterator[Figure]:
    """Figures of STEPS decode steps of ROWS requests, whose prompts a run before has left in the prefix cache."""
    from torch.profiler import ProfilerActivity, profile

    from weft.bench.measure import run_batch
    from weft.bench.workload import random_requests

    rows, context, steps = (2, 5, 2) if rehearse else (ROWS, CONTEXT, STEPS)
    room = max(1, llm.num_blocks * llm.plan.block_size // (2 * context))
    asks = random_requests(7, vocab=vocab, count=min(rows, room), input_len=(context, context), output_len=steps)
    run_batch(llm, asks)
    if rehearse:  # a stand-in for a card has no kernels: some operations take their place
        with profile(activities=[ProfilerActivity.CPU]) as recorder:
            torch.ones(4).mul(2)
    else:
        with profile(activities=[ProfilerActivity.CUDA]) as recorder:
            run_batch(llm, asks)
    yield from step_figures(name, kernel_spans(recorder.events(), "CPU" if rehearse else "CUDA"))


def kernel_spans(events: Iterable[Any], device: str) -> list[Span]:
    """Kernels, copies and fills of a kind of device among the profiler's events."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == device
    ]


def step_figures(name: str, spans: list[Span]) -> Iterator[Figure]:
    if not spans:
        yield Figure(f"{name}: profile", None, "", ok=False, note="the profiler recorded no kernel")
        return
    yield Figure(f"{name}: GPU idle in {STEPS} steps", round(100 * idle_share(spans), 2), "% idle")
    for kind, microseconds in class_times(spans).items():
        yield Figure(f"{name}: {kind}, per step", round(microseconds / STEPS, 2), "us")
