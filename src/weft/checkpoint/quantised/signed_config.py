"""compressed-tensors' `int-quantized` (w8a8) in a quantization_config: 8-bit integers, a scale per row or matrix.

`input_activations` are described too, dynamic or static. They are not rounded: see `checkpoint.quantised.signed`.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields

PACKING = "int-quantized"
STRATEGIES = ("channel", "tensor")


def unsupported_group(group: Fields) -> Iterator[str]:
    """Describe each feature that Weft does not read of an `int-quantized` group of compressed-tensors."""
    weights = group.nested("weights") or Fields({}, group.where)
    bits, kind = weights.integer_or("num_bits", None), weights.text_or("type", "int")
    if kind != "int" or bits != 8:
        yield f"compressed-tensors (int-quantized) in {bits} bits ({kind})"
    strategy = weights.text_or("strategy", None) or "tensor"
    if strategy not in STRATEGIES:
        yield f"compressed-tensors (int-quantized) with a scale for each {strategy}"
    if not weights.flag("symmetric", True):
        yield "compressed-tensors (int-quantized) with zero points"


def parse_weights(weights: Fields, *, mixed: bool) -> PublishedQuantization:
    """The quantisation of an `int-quantized` group without unsupported features."""
    is_by_row = weights.text_or("strategy", None) == "channel"
    return PublishedQuantization(
        method="compressed-tensors",
        bits=8,
        group=ROW,
        symmetric=True,
        wide="signed",
        rows=1 if is_by_row else ROW,
        mixed=mixed,
    )
