"""Our dequantisation is the gguf library's, bit for bit, for every block that there can be."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tests.pure.gguf_files import random_blocks
from weft.checkpoint.files.tensor import ENCODINGS
from weft.ranks.weights.blocks import BLOCKS, dequantise


def test_every_quantised_type_is_here() -> None:
    assert BLOCKS.keys() == {name for name, encoding in ENCODINGS.items() if encoding.elements > 1}


@pytest.mark.parametrize("type", BLOCKS)
def test_dequantised_blocks_are_the_library_s(type: str) -> None:
    rows, cols = 96, 2048
    data = random_blocks(np.random.default_rng(len(type)), rows, cols, type)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type])
    got = dequantise(torch.from_numpy(data), type)
    assert got.dtype == torch.float32
    assert got.shape == (rows, cols)
    assert np.array_equal(got.numpy().view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("type", BLOCKS)
def test_rows_may_lie_apart(type: str) -> None:
    """A rank that owns some of the columns reads such rows."""
    encoding = ENCODINGS[type]
    data = torch.from_numpy(random_blocks(np.random.default_rng(1), 8, 4 * encoding.elements, type))
    part = data[:, encoding.nbytes : 3 * encoding.nbytes]
    assert torch.equal(dequantise(part, type), dequantise(data, type)[:, encoding.elements : 3 * encoding.elements])
