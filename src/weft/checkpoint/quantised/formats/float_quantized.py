"""compressed-tensors' `float-quantized` and `naive-quantized`: FP8 with a scale per tensor, row, group or block.

Both store numbers and scales alike, as in `layouts.byte_numbers`.
"""

from __future__ import annotations

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised import compressed_tensors
from weft.checkpoint.quantised.format import Format
from weft.checkpoint.quantised.formats.fp8 import unsupported_block
from weft.checkpoint.quantised.layouts.byte_numbers import join_fp8

BLOCK = [128, 128]  # the default block
# Rows and columns that share a scale, by strategy; blocks and groups say theirs.
STRATEGIES = {"tensor": (ROW, ROW), "channel": (1, ROW)}


def _unsupported(group: Fields) -> str | None:
    weights = compressed_tensors.group_weights(group)
    strategy = weights.text_or("strategy", None) or "tensor"
    if strategy not in (*STRATEGIES, "block", "group"):
        return f"compressed-tensors in FP8 with a scale for each {strategy}"
    feature = None
    if strategy not in STRATEGIES:
        feature = unsupported_block(compressed_tensors.METHOD, list(_rows_and_columns(weights)))
    inputs = group.nested("input_activations")
    if feature is None and inputs is not None and not compressed_tensors.is_floating(inputs):
        return (
            f"compressed-tensors in FP8 with activations in {inputs.values.get('num_bits')} bits "
            f"({inputs.text_or('type', 'int')})"
        )
    return feature


def _rows_and_columns(weights: Fields) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    strategy = weights.text_or("strategy", None) or "tensor"
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    if strategy == "group":
        return 1, weights.integer_or("group_size", None) or BLOCK[1]
    block = weights.values.get("block_structure") or BLOCK
    if not isinstance(block, list) or len(block) != 2:
        raise weights.wrong_value("block_structure", "two numbers")
    return block[0], block[1]


def _parse(group: Fields) -> PublishedQuantization:
    rows, columns = _rows_and_columns(compressed_tensors.group_weights(group))
    return PublishedQuantization(
        method=compressed_tensors.METHOD, bits=8, group=columns, symmetric=True, floating=True, rows=rows
    )


FORMAT = Format(
    methods=(compressed_tensors.METHOD,),
    packings=("float-quantized", "naive-quantized"),
    numbers=("fp8",),
    listed="compressed-tensors float-quantized",
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=compressed_tensors.quantised_layers,
    join=join_fp8,
)
