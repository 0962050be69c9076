"""The quick measurement of the compiled kernels, by the entries that the engine calls."""

from __future__ import annotations

import math
import os
from itertools import pairwise

import numpy as np
import pytest

from tests.cpu.kernels import built
from weft.checkpoint.quantised.schemes import Scheme
from weft.machine.hardware.cpus import HELD, bytes_of
from weft.probes import kernel_speed
from weft.probes.kernel_speed import COLS, SOME, MeasuredKernels


@pytest.fixture(scope="module")
def library() -> str:
    return str(built("bfloat16"))


def test_all_kernels_are_measured(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "ROUNDS_S", 0.0)
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)  # of the tests' own process
    found = kernel_speed.measure(library, (core,), np.full(2 << 20, SOME, np.uint8))
    assert [it.bits for it in found.products] == [16, 8, 4]
    figures = [found.cache_Bps, found.attention_flops, found.rows_Bps]
    for product in found.products:
        assert all(fewer >= more for fewer, more in pairwise(product.weights_Bps))
        figures += [*product.weights_Bps, product.matmul_flops]
    assert all(1e6 < figure < math.inf for figure in figures)


@pytest.mark.parametrize("scheme", HELD, ids=lambda scheme: str(scheme.bits) if scheme else "16")
def test_a_product_reads_all_of_its_weights_and_nothing_else(
    library: str, scheme: Scheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, scales and minima where the kernels look for them: a product of ones is the sum of the weights."""
    rows = 64
    size = int(rows * COLS * bytes_of(scheme))
    memory = np.full(size, SOME, np.uint8)
    kernels, outs = MeasuredKernels(library, 1, memory), list[np.ndarray]()
    filled = kernel_speed.filled

    def kept(rows: int, cols: int) -> np.ndarray:
        outs.append(filled(rows, cols))
        return outs[-1]

    monkeypatch.setattr(kernel_speed, "filled", kept)
    kernels.product(scheme, rows, 1)()
    x, out = ((it.astype(np.uint32) << 16).view(np.float32) for it in outs)
    half = np.frombuffer(bytes([SOME, SOME]), np.float16).astype(np.float32)[0]
    # Of 8 bits the middle is zero; of 4 two are in a byte, and the lowest is the minimum.
    weight = {16: x[0, 0], 8: half * (SOME - 128), 4: half * ((SOME % 16 + SOME // 16) / 2 + 1)}
    expected = COLS * x[0, 0] * weight[scheme.bits if scheme else 16]
    assert out == pytest.approx(np.full_like(out, expected), rel=0.02)
