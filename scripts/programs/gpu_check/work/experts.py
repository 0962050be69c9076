"""Mixtures of experts: bytes of the weights that are read per second, over layers that no cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from scripts.programs.gpu_check.work import Figure, Options, is_wanted
from scripts.programs.gpu_check.work.products import COLD_BYTES, CUDA, REPLAYS, copied, filled, timed, warm
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.usable import multiprocessor_count
from weft.ranks.quant.quantised import QuantisedWeight

TYPES = (None, "Q4_1", "INT8", "MXFP4")
SPECS = {
    "Qwen3-30B-A3B": (Experts(count=128, top_k=8, width=768), 2048),
    "Mixtral-8x7B": (Experts(count=8, top_k=2, width=14336), 4096),
    "gpt-oss-20b": (Experts(count=32, top_k=4, width=2880, limit=7.0, gain=1.702, up_offset=1.0), 2880),
}
TINY = {"tiny": (Experts(count=4, top_k=2, width=32), 32)}
TOKENS = (1, 4, 16, 64, 256, 2048)
SOME_TYPES, SOME_SPECS, SOME_TOKENS = ("MXFP4", "Q4_1"), ("gpt-oss-20b", "Qwen3-30B-A3B"), (1, 16, 64, 256)


def experts(options: Options) -> Iterator[Figure]:
    """With `short`, those of SOME_TYPES and SOME_SPECS."""
    rehearse, short = options["rehearse"], options.get("short", False)
    specs = {name: SPECS[name] for name in SOME_SPECS} if short else SPECS
    tokens: Sequence[int] = SOME_TOKENS if short else TOKENS
    if rehearse:
        specs, tokens = TINY, (1, 2)
    dtype = torch.float32 if rehearse else torch.bfloat16
    matrices = TritonMatrices(multiprocessor_count(CUDA))
    for name, (spec, hidden) in specs.items():
        for kind in SOME_TYPES if short else TYPES:
            title = f"{name} {kind or str(dtype).removeprefix('torch.')}"
            if not is_wanted(options, title):
                continue
            stacks = made_up(kind, 2 * spec.width, hidden, spec, dtype), made_up(kind, hidden, spec.width, spec, dtype)
            nbytes = sum(stack.weight.nbytes for stack in stacks)
            layers = [matrices.experts(spec, *stacks, 0)]
            for _ in range(1 if rehearse else further_layers(nbytes, spec, min(tokens))):
                layers.append(matrices.experts(spec, copied_stack(stacks[0]), copied_stack(stacks[1]), 0))
            warm(matrices, max(tokens), options)
            for batch in tokens:
                if not is_wanted(options, f"{title}, {batch} tokens"):
                    continue
                steps = [random_step(spec, batch, hidden, dtype) for _ in layers]
                calls = [partial(layer, *step) for layer, step in zip(layers, steps, strict=True)]
                seconds = timed(calls, 1 if rehearse else REPLAYS)
                touched = sum(len(chosen.unique()) for _, chosen, _ in steps) / len(steps)
                read = nbytes * touched / spec.count
                yield Figure(
                    f"{title}, {batch} tokens",
                    round(read / seconds / 1e9, 1),
                    "GB/s",
                    round(options["copy_Bps"] / 1e9, 1) if batch <= 16 else None,  # more are bound by arithmetic
                    note=f"{seconds * 1e6:.1f} us, {touched:.0f} experts",
                )


def further_layers(nbytes: int, spec: Experts, tokens: int) -> int:
    """Layers beside the first, so that steps of `tokens` tokens read COLD_BYTES before they read the same again."""
    read = nbytes * min(tokens * spec.top_k, spec.count) / spec.count
    return int(COLD_BYTES // read)


def copied_stack(stack: ExpertStack) -> ExpertStack:
    return stack._replace(weight=copied(stack.weight))


def made_up(kind: str | None, rows: int, cols: int, spec: Experts, dtype: torch.dtype) -> ExpertStack:
    """Weights that are quickly made."""
    if kind is None:
        return ExpertStack("", torch.randn(spec.count, rows, cols, device=CUDA, dtype=dtype) / cols**0.5, None)
    return ExpertStack("", filled(QuantisedWeight.empty(kind, rows, Span(0, cols), dtype, CUDA, (spec.count,))), None)


def random_step(spec: Experts, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, the experts that they choose, and their shares."""
    scores = torch.randn(tokens, spec.count, device=CUDA)
    return (torch.randn(tokens, hidden, device=CUDA).to(dtype), *choose_experts(scores, spec))
