"""Products with numbers that have 32-bit scales: x is multiplied as it is, in C++ and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.kernels import native, triton_kernels
from tests.cpu.matrices import CPU, random
from weft.checkpoint.architectures.place import Span
from weft.ranks.kernels.native.rounding import NativeRounding
from weft.ranks.quant.quantised import QuantisedWeight

TYPES = ("NF4_64", "FP4_32", "NF4_512", "SIGNED8_ROW")
# Groups that are cut, rows and columns that fill no tile.
CUTS = [(33, Span(0, 576), 576), (1, Span(0, 32), 32), (70, Span(160, 800), 928)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("rows", "cols", "width"), CUTS, ids=str)
def test_products_in_cpp(type: str, dtype: torch.dtype, rows: int, cols: Span, width: int) -> None:
    weight, generator = random(type, rows, cols, width, dtype=dtype), torch.Generator().manual_seed(2)
    bias = torch.randn(rows, generator=generator).to(dtype)
    product, exact = native(dtype).matrices.matrix(weight, bias), weight.dequantise()
    for tokens in (1, 2, 3, 4, 5, 13, 40):
        x = torch.randn(tokens, len(cols), generator=generator).mul_(4).to(dtype)
        want = x.float() @ exact.T + bias.float()
        close = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(product(x).float(), want, rtol=close, atol=close * float(want.std(correction=0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("rows", "cols", "width"), CUTS[::2], ids=str)
def test_products_in_triton(type: str, dtype: torch.dtype, rows: int, cols: Span, width: int) -> None:
    pytest.importorskip("triton", reason="needs triton")
    weight, generator = random(type, rows, cols, width, dtype=dtype), torch.Generator().manual_seed(2)
    bias = torch.randn(rows, generator=generator).to(dtype)
    exact = weight.dequantise(dtype).float()
    product = triton_kernels(24).matrices.matrix(weight, bias)
    for tokens in (1, 40):
        x = torch.randn(tokens, len(cols), generator=generator).to(dtype)
        close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-2}
        torch.testing.assert_close(product(x).float(), x.float() @ exact.T + bias.float(), **close)


@pytest.mark.parametrize("type", TYPES)
def test_rounding_takes_the_nearest_number(type: str) -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(8, 512, generator=generator) * torch.logspace(-3, 2, 8)[:, None]
    into = QuantisedWeight.empty(type, 8, Span(0, 512), torch.float32, CPU)
    NativeRounding(torch.float32)(w, into)
    again = QuantisedWeight.empty(type, 8, Span(0, 512), torch.float32, CPU)
    NativeRounding(torch.float32)(into.dequantise(), again)
    torch.testing.assert_close(again.dequantise(), into.dequantise())
    groups, found = (value.unflatten(1, (-1, min(into.scheme.group, 512))) for value in (w, into.dequantise()))
    widest = 0.16 if into.scheme.bits == 4 else 0.5 / 127  # half of the widest step, as a share of the largest number
    if type.startswith("FP4"):
        widest = 1 / 6
    assert ((groups - found).abs().amax(-1) <= widest * groups.abs().amax(-1) * (1 + 1e-4)).all()
