"""Products and experts by the library humming-kernels beside Weft's own, of the same weights, over copies that no cache
holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.experts import SPECS, TINY, copied_stack, further_layers, random_step
from scripts.programs.gpu_check.work.experts import made_up as made_up_stack
from scripts.programs.gpu_check.work.products import COLD_BYTES, CUDA, REPLAYS, copied, made_up, timed
from weft.ranks.kernels.humming import check, create_experts, create_matrix
from weft.ranks.kernels.humming.library import first_line
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.usable import UnusableError, multiprocessor_count
from weft.ranks.quant.quantised import QuantisedWeight

KINDS = ("INT4_128", "Q4_1", "FP8_128")
ROWS, COLS = 4096, 4096
TOKENS = (16, 1, 256)  # each is another kernel, which the library compiles
DTYPE = torch.bfloat16

Calls = Sequence[Callable[[], torch.Tensor]]


def humming(options: Options) -> Iterator[Figure]:
    """Ratios above 1 if the library is the faster one. The note has both times, and what the first calls took."""
    rehearse = options["rehearse"]
    own = TritonMatrices(multiprocessor_count(CUDA))
    for kind in ("MXFP4", *KINDS):
        try:
            yield from (of_experts if kind == "MXFP4" else partial(of_matrices, kind=kind))(own, rehearse=rehearse)
        except (UnusableError, RuntimeError) as error:  # the library is not here, or cannot compile this kernel
            yield Figure(f"{kind}: humming-kernels to Weft", None, "times", note=first_line(error))


def of_matrices(own: TritonMatrices, *, kind: str, rehearse: bool) -> Iterator[Figure]:
    rows, cols = (64, 128) if rehearse else (ROWS, COLS)
    weight = made_up(kind, rows, cols, DTYPE)
    count = 2 if rehearse else COLD_BYTES // weight.nbytes + 1
    weights = [weight if at == 0 else copied(weight) for at in range(count)]
    ours = [own.matrix(each, None) for each in weights]
    theirs = [create_matrix(each, rows=max(TOKENS)) for each in weights if isinstance(each, QuantisedWeight)]
    for tokens in TOKENS[-1:] if rehearse else TOKENS:
        x = torch.randn(tokens, cols, device=CUDA).to(DTYPE)
        calls = [[partial(product, x) for product in products] for products in (ours, theirs)]
        yield compared(f"[{rows}, {cols}] {kind}, {tokens} tokens", *calls, rehearse=rehearse)


def of_experts(own: TritonMatrices, *, rehearse: bool) -> Iterator[Figure]:
    """gpt-oss-20b's, in MXFP4."""
    spec, hidden = TINY["tiny"] if rehearse else SPECS["gpt-oss-20b"]
    stacks = [made_up_stack("MXFP4", *dims, spec, DTYPE) for dims in ((2 * spec.width, hidden), (hidden, spec.width))]
    nbytes = sum(stack.weight.nbytes for stack in stacks)
    layers = [stacks]
    for _ in range(1 if rehearse else further_layers(nbytes, spec, min(TOKENS))):
        layers.append([copied_stack(stack) for stack in stacks])
    ours = [own.experts(spec, gate_up, down, 0) for gate_up, down in layers]
    theirs = [create_experts(spec, gate_up, down, tokens=max(TOKENS)) for gate_up, down in layers]
    for tokens in TOKENS[1:2] if rehearse else TOKENS:
        steps = [random_step(spec, tokens, hidden, DTYPE) for _ in layers]
        calls = [
            [partial(layer, *step) for layer, step in zip(experts, steps, strict=True)] for experts in (ours, theirs)
        ]
        yield compared(f"experts of gpt-oss-20b in MXFP4, {tokens} tokens", *calls, rehearse=rehearse)


def compared(title: str, ours: Calls, theirs: Calls, *, rehearse: bool) -> Figure:
    """The ratio of the times of one call."""
    began = time.monotonic()
    result = theirs[0]()
    torch.cuda.synchronize()
    first = time.monotonic() - began
    off = check.difference(result, ours[0]().float())
    took, its = (timed(calls, 1 if rehearse else REPLAYS) for calls in (ours, theirs))
    note = (
        f"{took * 1e6:.1f} us by Weft, {its * 1e6:.1f} us by humming-kernels, {off:.2%} apart; {first:.1f} s at first"
    )
    return Figure(
        f"{title}: humming-kernels to Weft",
        round(took / its, 3),
        "times",
        ok=rehearse or off < check.TOLERANCE,
        note=note,
    )
