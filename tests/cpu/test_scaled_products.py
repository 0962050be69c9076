"""FP8 products of GPUs that have FP8 units: when torch._scaled_mm is chosen, and what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu.kernels import triton_kernels
from tests.cpu.matrices import random
from weft.checkpoint.architectures.place import Span

pytest.importorskip("triton", reason="needs triton")

from weft.ranks.kernels.triton import fp8, products
from weft.ranks.kernels.triton.fp8 import ScaledMatrix, has_fp8_units

COLS = Span(0, 96)


def matrix(type: str, rows: int, dtype: torch.dtype, *, fp8_units: bool, bias: torch.Tensor | None = None) -> Any:
    weight = random(type, rows, COLS, 96, dtype=dtype)
    return triton_kernels(4, fp8_units=fp8_units).matrices.matrix(weight, bias)


def test_it_is_chosen_where_the_card_and_the_form_permit() -> None:
    assert isinstance(matrix("FP8_ROW", 32, torch.bfloat16, fp8_units=True), ScaledMatrix)
    for type, rows, dtype, units in (
        ("FP8_ROW", 32, torch.bfloat16, False),
        ("FP8_ROW", 33, torch.bfloat16, True),
        ("FP8_ROW", 32, torch.float16, True),
        ("FP8_128", 32, torch.bfloat16, True),
        ("INT8_ROW_SYM", 32, torch.bfloat16, True),
    ):
        assert not isinstance(matrix(type, rows, dtype, fp8_units=units), ScaledMatrix), (type, rows, dtype, units)


@pytest.mark.parametrize(("capability", "has"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_cards_with_fp8_units(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_fp8_units(torch.device("cuda", 0)) == has
    assert not has_fp8_units(torch.device("cpu"))


def test_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in checks the rules of torch's documentation, and multiplies in float32."""
    bias = torch.randn(32).bfloat16()
    product, calls = matrix("FP8_ROW", 32, torch.bfloat16, fp8_units=True, bias=bias), []

    def scaled_mm(
        a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any, out_dtype: Any
    ) -> torch.Tensor:
        calls.append(len(a))
        assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == bias.dtype == torch.bfloat16
        assert a.is_contiguous() and b.t().is_contiguous() and not a.shape[1] % 16 and not b.shape[1] % 16
        assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.is_contiguous() and scale_b.is_contiguous()
        assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
        return ((a.float() * scale_a) @ (b.float() * scale_b) + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x = torch.randn(products.MANY, 96).mul_(torch.logspace(-3, 3, products.MANY)[:, None]).bfloat16()
    x[3] = 0
    got = product(x)
    exact = x.float() @ random("FP8_ROW", 32, COLS, 96).dequantise().T + bias.float()
    assert calls == [products.MANY]
    error = (got.float() - exact).norm(dim=1) / exact.norm(dim=1)
    # E4M3 has steps of a sixteenth; each token has a scale of its own.
    assert float(error.mean()) > 1e-3
    assert float(error[4:].max()) < 0.06 and float(error[3]) < 0.01
    monkeypatch.setattr(fp8, "MANY", products.MANY + 1)
    monkeypatch.setattr(fp8.QuantisedMatrix, "__call__", lambda self, x: "weights alone are FP8")
    assert product(x) == "weights alone are FP8" and calls == [products.MANY]
