"""compressed-tensors' `int-quantized` (w8a8), by the tensors of its compressors: signed 8-bit integers.

NAME.weight is I8 [rows, cols], NAME.weight_scale [rows, 1] or a single number.
"""

from __future__ import annotations

from functools import partial

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised import compressed_tensors
from weft.checkpoint.quantised.format import Format
from weft.checkpoint.quantised.layouts.byte_numbers import join_signed

STRATEGIES = ("channel", "tensor")


def _unsupported(group: Fields) -> str | None:
    weights = compressed_tensors.group_weights(group)
    bits, kind = weights.integer_or("num_bits", None), weights.text_or("type", "int")
    if kind != "int" or bits != 8:
        return f"compressed-tensors (int-quantized) in {bits} bits ({kind})"
    strategy = weights.text_or("strategy", None) or "tensor"
    if strategy not in STRATEGIES:
        return f"compressed-tensors (int-quantized) with a scale for each {strategy}"
    if not weights.flag("symmetric", True):
        return "compressed-tensors (int-quantized) with zero points"
    return None


def _parse(group: Fields) -> PublishedQuantization:
    is_by_row = compressed_tensors.group_weights(group).text_or("strategy", None) == "channel"
    return PublishedQuantization(
        method=compressed_tensors.METHOD,
        bits=8,
        group=ROW,
        symmetric=True,
        wide="signed",
        rows=1 if is_by_row else ROW,
    )


FORMAT = Format(
    methods=(compressed_tensors.METHOD,),
    packings=("int-quantized",),
    numbers=("signed",),
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=compressed_tensors.quantised_layers,
    join=partial(join_signed, scales=".weight_scale"),
)
