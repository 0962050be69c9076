"""AWQ (gemm), by the fields of AutoAWQ's quant_config and the tensors of its awq/modules/linear/gemm.py."""

from __future__ import annotations

from functools import partial

from weft.checkpoint.architectures.published import PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised.format import Format, Predicate
from weft.checkpoint.quantised.formats.gptq import group_columns, integer_bits
from weft.checkpoint.quantised.layouts.words import WordLayout, join_words

# Numbers [cols, rows packed], scales [groups, rows] and zero points [groups, rows packed].
LAYOUT = WordLayout(
    values="qweight",
    scales="scales",
    zeros="qzeros",
    turned=True,
    packs_rows=True,
    nibbles=(0, 2, 4, 6, 1, 3, 5, 7),
)


def _unsupported(config: Fields) -> str | None:
    bits, packing = integer_bits(config), _packing(config)
    if bits != 4:
        return f"awq in {bits} bits"
    return None if packing == "gemm" else f"awq in the format {packing}"


def _packing(config: Fields) -> str:
    if config.flag("is_marlin_format"):
        return "marlin"
    return (config.text_or("version", None) or config.text_or("format", None) or "gemm").lower()


def _parse(config: Fields) -> PublishedQuantization:
    return PublishedQuantization(method="awq", bits=integer_bits(config), group=group_columns(config), symmetric=False)


def _quantised_layers(config: Fields) -> Predicate:
    excluded = config.names("modules_to_not_convert")
    return lambda name: not name.endswith("lm_head") and not any(part in name for part in excluded)


FORMAT = Format(
    methods=("awq",),
    numbers=("integers",),
    listed="AWQ (gemm)",
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=_quantised_layers,
    join=partial(join_words, layout=LAYOUT),
    stored_name="{layer}qweight",
    vllm=("awq_marlin",),
    aliases={"awq": "int4", "awq-int4": "int4"},
)
