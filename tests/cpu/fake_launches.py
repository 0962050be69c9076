"""Launches of Triton's kernels on the stand-in for a card (fake_cuda.py): in its interpreter, or, where that takes it
milliseconds for each of many small programs, in torch. tests/cpu/test_triton*.py have the kernels themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.cpu.fake_cuda import CardError, OnCard, card, plainly
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, Scheme
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.kernels.plain.sampling import PlainTokenSampler
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.quant.rounding import round_into
from weft.ranks.worker.sample_arrays import SampleArrays

LOG2_E = 1.4426950408889634
MAX_PROGRAMS = (2**31 - 1, 65535, 65535)  # programs, by the dims of a grid
PLAIN = create_plain_kernels()
NO_PICKS = np.zeros(0, dtype=np.int64)


def launch(real: Callable[..., None]) -> Callable[..., None]:
    """Triton's launches, in place of its interpreter's own."""

    def launched(executor: Any, *given: Any, **constants: Any) -> None:
        card.check_current_device()
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        if len({isinstance(x, OnCard) for x in tensors}) == 2:
            raise CardError(f"{executor.fn.__name__}: a pointer that the card cannot read")
        grid = executor.grid(constants) if callable(executor.grid) else executor.grid
        if any(limit < side for limit, side in zip(MAX_PROGRAMS, grid, strict=False)):
            raise CardError(f"{executor.fn.__name__}: a grid of {grid}")
        card.note_launch(executor.fn.__name__)
        given = tuple(x.held if isinstance(x, OnCard) else x for x in given)

        def run() -> None:
            if all(grid):
                with card.lock, torch.inference_mode(), plainly():
                    SWIFT.get(executor.fn.__name__, partial(real, executor))(*given, **constants)

        if card.captures():
            card.record(run, [])
        else:
            run()

    return launched


def _norm(x: Any, residual: Any, weight: Any, out: Any, width: int, eps: float, *, ADD: bool, **_: Any) -> None:
    value = residual.add_(x) if ADD else x
    out.copy_(PLAIN.pointwise.norm(value, weight, eps))


def _silu(gate_up: torch.Tensor, out: torch.Tensor, *_: Any, **__: Any) -> None:
    out.copy_(PLAIN.pointwise.silu_mul(gate_up))


def _rotate(
    qkv: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rope: torch.Tensor,
    angle_rows: torch.Tensor, slots: torch.Tensor, q_norm: Any, k_norm: Any, eps: float, q_heads: int, *_: Any,
    NORM: bool, **__: Any,
) -> None:  # fmt: skip
    norm = HeadNorm(q_norm, k_norm, eps) if NORM else None
    real = slots >= 0
    batch: Any = SimpleNamespace(angle_rows=angle_rows[real], slots=slots[real])
    wide = KVCache(*(torch.zeros(cache.shape, dtype=qkv.dtype) for cache in (keys, values)))
    q.zero_()
    q[real] = PLAIN.pointwise.rotate_and_store(qkv[real], q_heads, rope, wide, batch, norm)
    for cache, written in ((keys, wide.keys), (values, wide.values)):
        rows = written.flatten(0, 1)[batch.slots]
        kept = rows.clamp(-448, 448).to(cache.dtype) if cache.itemsize == 1 else rows
        # As bytes: index_copy_ knows no FP8.
        cache.view(torch.uint8).flatten(0, 1).index_copy_(0, batch.slots, kept.view(torch.uint8))


def _prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    sinks: torch.Tensor, row_starts: torch.Tensor, tables: torch.Tensor, context: torch.Tensor, first: int, rows: int,
    width: int, q_heads: int, kv_heads: int, head_dim: int, scale: float, window: int, *, WINDOWED: bool, LSE: bool,
    SINKS: bool, **_: Any,
) -> None:  # fmt: skip
    begin, tables = int(row_starts[first]), tables[first:]
    assert tables.stride(0) == width and len(tables) == rows
    some: Any = SimpleNamespace(row_starts=row_starts[first:] - begin, context=context[first:], tables=tables)
    seen = window if WINDOWED else None
    cache = KVCache(keys.to(q.dtype), values.to(q.dtype))
    more = lse[begin:] if LSE else None, sinks if SINKS else None
    out[begin:] = PLAIN.attention.attend(q[begin:], cache, some, scale / LOG2_E, seen, *more)


def _draw(
    logits: torch.Tensor, stride: int, vocab: int, slots: torch.Tensor, positions: torch.Tensor,
    settings: torch.Tensor, keys: torch.Tensor, tops: Any, sums: Any, floors: Any, blocks: int, chosen: torch.Tensor,
    **_: Any,
) -> None:  # fmt: skip
    assert logits.shape[1] == vocab and logits.stride(0) == stride
    torchs: Any = PlainTokenSampler(len(settings))
    torchs._settings.columns[:], torchs._settings.keys[:] = settings.numpy(), keys.numpy().view(np.uint64)
    arrays = SampleArrays(NO_PICKS, slots.numpy(), positions.numpy())
    chosen.copy_(torchs.sample_tokens(logits, arrays, arrays))


def _round(
    weight: torch.Tensor, importance: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor,
    total: int, groups: int, width: int, cols: int, lacking: int, *, BITS: int, GROUP: int, LOWEST: str, COUNTED: bool,
    **_: Any,
) -> None:  # fmt: skip
    assert (total, width) == (len(weight) * groups, weight.shape[1])
    scheme = Scheme(bits=BITS, group=GROUP, lowest=LOWEST)  # type: ignore[arg-type]
    type = next(name for name, known in ALL_SCHEMES.items() if known == scheme)
    into = QuantisedWeight(type, values, scales, None if LOWEST == "middle" else lowest, lacking, weight.dtype)
    assert into.shape == (len(weight), cols)
    round_into(weight, into, importance if COUNTED else None)


def _nothing(*_: Any, **__: Any) -> None:
    pass


SWIFT: dict[str, Callable[..., None]] = {
    "_rms_norm": _norm,
    "_silu_mul": _silu,
    "_rotate_and_store": _rotate,
    "_prefill": _prefill,
    "_round": _round,
    "_draw": _draw,
    "_survey": _nothing,
    "_filter": _nothing,
}
