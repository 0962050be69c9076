"""Products with plain weights on CPUs with and without what oneDNN's packed weights need."""

from __future__ import annotations

import pytest
import torch

from weft.ranks.quant import dense


@pytest.mark.parametrize("packs", [False, dense.onednn_packs_bfloat16()])
def test_bfloat16_is_multiplied_with_and_without_packed_weights(monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    monkeypatch.setattr(dense, "onednn_packs_bfloat16", lambda: packs)
    generator = torch.Generator().manual_seed(0)
    weight, other = (torch.randn(24, 16, generator=generator).bfloat16() for _ in range(2))
    x, bias = torch.randn(3, 16, generator=generator).bfloat16(), torch.randn(24, generator=generator).bfloat16()
    product = dense.create_product(weight.clone(), bias)
    assert isinstance(product, dense.PackedProduct) == packs
    for values in (weight, other):
        product.replace(values)
        exact = x.float() @ values.float().T + bias.float()
        torch.testing.assert_close(product(x).float(), exact, rtol=2e-2, atol=2e-2)
