"""Checkpoints whose weights can take the place of others."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.pure.shapes import SMOLLM2, repeated, with_attention, with_ffn
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names.catalogue import find
from weft.engine.client.control import shape_difference

EXPERTS = find("Qwen3-30B-A3B").shape.layers[0].ffn


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (SMOLLM2, ""),
        (replace(SMOLLM2, dtype="float16"), ""),
        (replace(SMOLLM2, hidden=7), f"its hidden is 7, not {SMOLLM2.hidden}"),
        (repeated(SMOLLM2, 2), f"its layers are 2, not {len(SMOLLM2.layers)}"),
        (with_ffn(SMOLLM2, width=8), f"its layers[0].ffn.width is 8, not {SMOLLM2.layers[0].ffn.width}"),
        (with_attention(SMOLLM2, window=9), "its layers[0].mixer.window is 9, not None"),
        (replace(SMOLLM2, layers=(*SMOLLM2.layers[:-1], replace(SMOLLM2.layers[-1], norms="both"))), "[29].norms is "),
        (replace(SMOLLM2, layers=(replace(SMOLLM2.layers[0], ffn=EXPERTS), *SMOLLM2.layers[1:])), "ffn is Experts("),
    ],
)
def test_the_first_difference_between_two_shapes(other: ModelShape, difference: str) -> None:
    found = shape_difference(other, SMOLLM2)
    assert difference in found and bool(found) == bool(difference)
