"""Composition of decode steps: the GPU's idle share, and its time by class and name of kernels, by torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from scripts.programs.gpu_check.traces import keep_trace
from scripts.programs.gpu_check.work import Figure, Options

if TYPE_CHECKING:
    from weft import LLM

STEPS, ROWS, CONTEXT = 20, 256, 560
KERNEL_SHARE, NAME = 0.01, 64  # of the busy time, below which a kernel is not named; characters of its name
CLASSES = (  # the first whose pattern a kernel's name matches
    ("attention", r"^_(decode|prefill|join|attend_expanded)|flash|fmha|BatchDecode|BatchPrefill"),
    ("sampling", r"^_(survey|filter|draw|mask)"),
    ("routing", r"^_(route|score|choose|sort|count|add_counts|place|sum$)"),
    ("step's arrays", r"^_lay"),
    ("products", r"^_(multiply|dequantise)|gemm|gemv|nvjet|cutlass|splitK|cublas|xmma|humming"),
    ("norms, rotation, activation", r"^_(rms_norm|silu_mul|activate|rotate_and_store|store_latents|sum_add_norm)"),
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
    return {name: total for name, (total, _) in grouped(spans, lambda span: class_of(span.name)).items()}


def kernel_times(spans: Iterable[Span]) -> dict[str, tuple[float, int]]:
    """Microseconds and launches by name, the longest first."""
    return grouped(spans, lambda span: span.name[:NAME])


def grouped(spans: Iterable[Span], key: Callable[[Span], str]) -> dict[str, tuple[float, int]]:
    """Microseconds and number of the spans of each key, the longest time first."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        times[key(span)] += span.end - span.begin
        counts[key(span)] += 1
    return {name: (times[name], counts[name]) for name in sorted(times, key=lambda name: -times[name])}


def profiled_steps(
    llm: LLM, name: str, vocab: int, options: Options, rows: int = ROWS, context: int = CONTEXT
) -> Iterator[Figure]:
    """Figures of STEPS decode steps of `rows` requests after `context` tokens, whose prompts a run before has left in
    the prefix cache. With `traces` among the options, the trace is kept (`keep_trace`)."""
    from torch.profiler import ProfilerActivity, profile

    from weft.study.bench.measure import run_batch
    from weft.study.bench.workload import random_requests

    rehearse, steps = options["rehearse"], STEPS
    if rehearse:
        rows, context, steps = 2, 5, 2
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
    if "traces" in options:
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            recorder.export_chrome_trace(str(trace))
            yield Figure(f"{name}: trace", None, "", note=keep_trace(options, name, trace))


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
    times = kernel_times(spans)
    busy = sum(total for total, _ in times.values())
    for kernel, (total, count) in times.items():
        if total >= KERNEL_SHARE * busy:
            note = f"{count / STEPS:.1f} launches"
            yield Figure(f"{name}: kernel {kernel}, per step", round(total / STEPS, 2), "us", note=note)
