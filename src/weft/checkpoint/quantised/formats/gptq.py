"""GPTQ, by the fields of GPTQModel's quantize_config and the tensors of its nn_modules/qlinear."""

from __future__ import annotations

from functools import partial

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised.format import Format, Predicate
from weft.checkpoint.quantised.layouts.words import WordLayout, join_words
from weft.checkpoint.quantised.name_patterns import ModuleList
from weft.checkpoint.quantised.schemes import BITS

# Numbers [cols packed, rows], scales [groups, rows] and zero points [groups, rows packed].
LAYOUT = WordLayout(values="qweight", scales="scales", zeros="qzeros", order="g_idx", turned=True)
PACKINGS = ("gptq", "gptq_v2")  # in the first, zero points are stored less 1


def _unsupported(config: Fields) -> str | None:
    bits, packing = integer_bits(config), _packing(config)
    if bits not in BITS:
        return f"gptq in {bits} bits"
    return None if packing in PACKINGS else f"gptq in the format {packing}"


def _parse(config: Fields) -> PublishedQuantization:
    group, dynamic = group_columns(config), config.nested("dynamic")
    return PublishedQuantization(
        method="gptq",
        bits=integer_bits(config),
        group=group,
        symmetric=config.flag("sym", True),
        ordered=config.flag("desc_act") and group != ROW and not config.flag("static_groups"),
        zero_offset=0 if _packing(config) == "gptq_v2" else 1,
        mixed=dynamic is not None and any(not key.startswith("-:") for key in dynamic.values),
    )


def integer_bits(config: Fields) -> int:
    """Bits of each number."""
    return config.integer_or("bits", None) or config.integer_or("w_bit", None) or 4


def group_columns(config: Fields) -> int:
    """Number of columns that share a scale, by default 128; ROW for -1 and null, which stand for a whole row."""
    key = "q_group_size" if "q_group_size" in config else "group_size"
    if config.values.get(key, 128) in (-1, None):
        return ROW
    return config.integer_or(key, 128) or ROW


def _packing(config: Fields) -> str:
    if config.flag("is_marlin_format"):
        return "marlin"
    packing = config.text_or("checkpoint_format", None) or config.text_or("format", None)
    return (packing or "gptq").lower()


def _quantised_layers(config: Fields) -> Predicate:
    head, included, dynamic = config.flag("lm_head"), _included(config), config.nested("dynamic")
    patterns = [key.removeprefix("-:") for key in (dynamic.values if dynamic else {}) if key.startswith("-:")]
    excluded = ModuleList((), patterns, config.where)

    def is_quantised(name: str) -> bool:
        if name.endswith("lm_head"):
            return head
        if name in excluded:
            return False
        return not included or any(name.endswith("." + part) for part in included)

    return is_quantised


def _included(config: Fields) -> list[str]:
    """Names of the modules that GPTQ quantised in each block; [] for all."""
    groups = config.values.get("modules_in_block_to_quantize") or []
    if not isinstance(groups, list):
        raise config.wrong_value("modules_in_block_to_quantize", "a list of lists of names")
    return [str(name) for names in groups for name in (names if isinstance(names, list) else [names])]


FORMAT = Format(
    methods=("gptq",),
    numbers=("integers",),
    listed="GPTQ",
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=_quantised_layers,
    join=partial(join_words, layout=LAYOUT),
    stored_name="{layer}qweight",
    vllm=("gptq_marlin",),
    aliases={"gptq": "int4", "gptq-int4": "int4", "gptq-int8": "int8"},
)
