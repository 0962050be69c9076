"""Products with quantised weights as compiled for the card, bfloat16 included; and the bandwidth they reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cpu.matrices import KINDS, MXFP4, random
from weft.checkpoint.architectures.place import Span
from weft.ranks.kernels.triton import products
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.usable import multiprocessor_count
from weft.ranks.quant.quantised import QuantisedWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda")
# Of a product's largest number: what the weights are rounded to before they are multiplied, and what comes out.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def there(weight: QuantisedWeight) -> QuantisedWeight:
    lowest = None if weight.lowest is None else weight.lowest.to(CUDA)
    return replace(weight, values=weight.values.to(CUDA), scales=weight.scales.to(CUDA), lowest=lowest)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("type", [*KINDS, MXFP4])
@pytest.mark.parametrize(
    ("rows", "cols", "width"),
    [(33, Span(0, 576), 576), (1, Span(0, 32), 32), (70, Span(160, 1408), 1664), (4096, Span(0, 14336), None)],
    ids=str,
)
def test_products(type: str, dtype: torch.dtype, rows: int, cols: Span, width: int | None) -> None:
    if width is None:
        weight = replace(made_up(type, rows, len(cols)), dtype=dtype)
    else:
        weight = there(random(type, rows, cols, width, dtype=dtype))
    bias = torch.randn(rows, device=CUDA).to(dtype)
    exact = weight.dequantise().double()
    matrices = TritonMatrices(multiprocessor_count(CUDA))
    product, table = matrices.matrix(weight, bias), matrices.embedding_table(weight)
    for tokens in (1, 2, 16, 17, 33, 100, 256, 257, 700):
        x = torch.randn(tokens, len(cols), device=CUDA).to(dtype)
        want = x.double() @ exact.T + bias.double()
        got = product(x)
        assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max(), tokens
        for _ in range(20):  # in whatever order the programs come to their ends
            assert torch.equal(product(x), got), "equal batches give equal bits"
    numbers = torch.tensor([0, rows - 1, rows // 2, 0], device=CUDA)
    torch.testing.assert_close(table.rows(numbers), weight.dequantise(dtype)[numbers], rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_product_is_captured(tokens: int) -> None:
    product = TritonMatrices(multiprocessor_count(CUDA)).matrix(there(random("Q4_1", 4096, Span(0, 4096), 4096)), None)
    x = torch.randn(tokens, 4096, device=CUDA, dtype=torch.bfloat16)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, product(x), rtol=0, atol=0)


def made_up(type: str, rows: int, cols: int) -> QuantisedWeight:
    """Numbers that are quickly made; none are negative where they need not be."""
    weight = QuantisedWeight.empty(type, rows, Span(0, cols), torch.bfloat16, CUDA)
    weight.values.random_(0, 256)
    weight.scales.fill_(120 if type == MXFP4 else 0.01)
    if weight.lowest is not None:
        weight.lowest.fill_(0)
    return weight


def test_the_scratch_is_bounded() -> None:
    weight = made_up("Q4_0", 65536, 8192)
    product = TritonMatrices(multiprocessor_count(CUDA)).matrix(weight, None)
    x = torch.randn(products.MANY, 8192, device=CUDA, dtype=torch.bfloat16)
    product(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = product(x)
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.nbytes + products.SCRATCH_BYTES
