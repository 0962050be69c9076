"""compressed-tensors' `pack-quantized` (w4a16, w8a16), by the tensors of its compressors/pack_quantized."""

from __future__ import annotations

from functools import partial

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised import compressed_tensors
from weft.checkpoint.quantised.format import Format
from weft.checkpoint.quantised.layouts.words import WordLayout, join_words
from weft.checkpoint.quantised.schemes import BITS

# Numbers [rows, cols packed], scales [rows, groups] and zero points [rows packed, groups]. Numbers and zero points are
# signed and stored with half their range added.
LAYOUT = WordLayout(
    values="weight_packed",
    scales="weight_scale",
    zeros="weight_zero_point",
    order="weight_g_idx",
    shape="weight_shape",
    zeros_optional=True,
)
ORDERS = ("group", "dynamic", True)  # values of `actorder` for groups in order of activations


def _unsupported(group: Fields) -> str | None:
    weights = compressed_tensors.group_weights(group)
    bits, kind = weights.integer_or("num_bits", None), weights.text_or("type", "int")
    strategy = weights.text_or("strategy", None) or "group"
    if kind != "int" or bits not in BITS:
        return f"compressed-tensors in {bits} bits ({kind})"
    if strategy not in ("group", "channel"):
        return f"compressed-tensors with a scale for each {strategy}"
    if group.nested("input_activations") is not None:
        return "compressed-tensors, and activations are quantised as well"
    return None


def _parse(group: Fields) -> PublishedQuantization:
    weights = compressed_tensors.group_weights(group)
    is_by_row = weights.values.get("group_size", -1) in (-1, None)
    columns = ROW if is_by_row else weights.integer("group_size")
    return PublishedQuantization(
        method=compressed_tensors.METHOD,
        bits=weights.integer("num_bits"),
        group=columns,
        symmetric=weights.flag("symmetric", True),
        ordered=weights.values.get("actorder") in ORDERS and columns != ROW,
    )


FORMAT = Format(
    methods=(compressed_tensors.METHOD,),
    packings=("pack-quantized",),
    numbers=("integers",),
    listed="compressed-tensors (pack-quantized)",
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=compressed_tensors.quantised_layers,
    join=partial(join_words, layout=LAYOUT),
    stored_name="{layer}weight_packed",
    copies={"quantized.w4a16": "int4", "quantized.w8a16": "int8"},
    aliases={"w4a16": "int4"},
)
