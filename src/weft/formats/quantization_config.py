"""Published: how GPTQ, AWQ and compressed-tensors say, in a config.json, that weights are quantised.

Fields: GPTQModel's quantize_config, AutoAWQ's quant_config and compressed-tensors' quantization_config, as Transformers
writes them into `quantization_config`. The tensors themselves are in `formats.packed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from weft.architectures.published import ROW, PublishedQuantization
from weft.errors import ModelError
from weft.formats.fields import Fields

BITS = (4, 8)
GROUPS = (32, 64, 128, 256, 512, 1024, ROW)  # columns that share a scale, of those that kernels multiply with
GROUP = 128  # of GPTQ and AWQ where the config does not say
ORDERS = ("group", "dynamic", True)  # compressed-tensors' words for groups that are made in that order
READ = "it reads GPTQ, AWQ (gemm) and compressed-tensors (pack-quantized) of 4 or 8 bits"


def unsupported_quantization(config: Fields) -> str | None:
    """What the weights are quantised with, in words, where Weft does not read it; `config` is the
    quantization_config."""
    method = config.text_or("quant_method", None)
    if method == "compressed-tensors":
        return next(_unread(config), None)
    if method not in ("gptq", "awq"):
        return method or "an unknown method (there is no quant_method)"
    bits, form = _bits(config), _form(config)
    if bits not in BITS or (method == "awq" and bits != 4):
        return f"{method} in {bits} bits"
    if form not in (("gptq", "gptq_v2") if method == "gptq" else ("gemm",)):
        return f"{method} in the format {form}"
    return None


def parse_quantization(config: Fields) -> PublishedQuantization:
    """What a quantization_config without an obstacle says of all matrices, exceptions left out."""
    method = config.text_or("quant_method", None)
    if method == "compressed-tensors":
        weights = _weights(next(_groups(config)))
        return PublishedQuantization(
            method="compressed-tensors",
            bits=weights.integer("num_bits"),
            group=_columns(weights, ROW),
            symmetric=weights.flag("symmetric", True),
            ordered=weights.values.get("actorder") in ORDERS,
        )
    group = _columns(config, GROUP)
    if method == "awq":
        return PublishedQuantization(method="awq", bits=_bits(config), group=group, symmetric=False)
    return PublishedQuantization(
        method="gptq",
        bits=_bits(config),
        group=group,
        symmetric=config.flag("sym", True),
        ordered=config.flag("desc_act") and group != ROW and not config.flag("static_groups"),
        zero_offset=0 if _form(config) == "gptq_v2" else 1,
    )


def quantised_layer_predicate(config: Fields) -> Callable[[str], bool]:
    """Whether the config says that a linear layer, by its name, is quantised."""
    method = config.text_or("quant_method", None)
    if method == "awq":
        left = _names(config, "modules_to_not_convert")
        return lambda name: not name.endswith("lm_head") and not any(part in name for part in left)
    if method == "compressed-tensors":
        ignored = _names(config, "ignore")
        targets = [target for group in _groups(config) for target in _names(group, "targets")]
        return lambda name: (
            any(target == "Linear" or _names_it(target, name) for target in targets)
            and not any(_names_it(entry, name) for entry in ignored)
        )
    head = config.flag("lm_head")
    dynamic = config.nested("dynamic")
    left = [key.removeprefix("-:") for key in (dynamic.values if dynamic else {}) if key.startswith("-:")]
    inside = config.values.get("modules_in_block_to_quantize") or []
    if not isinstance(inside, list):
        raise config.wrong("modules_in_block_to_quantize", "a list of lists of names")
    taken = [str(name) for names in inside for name in (names if isinstance(names, list) else [names])]

    def quantised(name: str) -> bool:
        if name.endswith("lm_head"):
            return head
        if any(_names_it("re:" + pattern, name) for pattern in left):
            return False
        return not taken or any(name.endswith("." + part) for part in taken)

    return quantised


def _bits(config: Fields) -> int:
    return config.integer_or("bits", None) or config.integer_or("w_bit", None) or 4


def _form(config: Fields) -> str:
    """How GPTQ's and AWQ's numbers are packed, in their words."""
    if config.flag("is_marlin_format"):
        return "marlin"
    awq = config.text_or("quant_method", None) == "awq"
    keys = ("version", "format") if awq else ("checkpoint_format", "format")
    found = next((text for key in keys if (text := config.text_or(key, None))), "gemm" if awq else "gptq")
    return found.lower()


def _columns(config: Fields, usual: int) -> int:
    """Columns of a group; -1 and null are all of a row."""
    key = "q_group_size" if "q_group_size" in config else "group_size"
    if config.values.get(key, usual) in (-1, None):
        return ROW
    return config.integer_or(key, usual) or ROW


def _groups(config: Fields) -> Iterator[Fields]:
    """The groups of compressed-tensors: what is done to which layers."""
    groups = config.nested("config_groups")
    for name in groups.values if groups else ():
        assert groups is not None
        if (group := groups.nested(name)) is not None:
            yield group


def _weights(group: Fields) -> Fields:
    return group.nested("weights") or Fields({}, group.where)


def _unread(config: Fields) -> Iterator[str]:
    """What compressed-tensors says that Weft does not read."""
    form, own = config.text_or("format", None), "compressed-tensors in the format"
    groups = list(_groups(config))
    if not groups:
        yield f"compressed-tensors in the format {form}, without config_groups"
    for group in groups:
        weights, packed = _weights(group), group.text_or("format", None) or form
        bits, kind = weights.integer_or("num_bits", None), weights.text_or("type", "int")
        strategy = weights.text_or("strategy", None) or "group"
        if packed != "pack-quantized":
            yield f"{own} {packed}"
        if kind != "int" or bits not in BITS:
            yield f"compressed-tensors in {bits} bits ({kind})"
        if strategy not in ("group", "channel"):
            yield f"compressed-tensors with a scale for each {strategy}"
        if group.nested("input_activations") is not None:
            yield "compressed-tensors, and activations are quantised as well"
    several = {_weights(group).values.get("num_bits") for group in groups}
    if len(several) > 1:
        yield f"compressed-tensors in {' and '.join(sorted(map(str, several)))} bits, one here and one there"
    sparsity = config.nested("sparsity_config")
    if sparsity is not None and sparsity.text_or("format", "dense") != "dense":
        yield f"{own} {sparsity.text_or('format', None)}"


def _names(config: Fields, key: str) -> list[str]:
    names = config.values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.wrong(key, "a list of names")
    return names


def _names_it(entry: str, name: str) -> bool:
    """Whether an entry of a list, a name or a regular expression after "re:", is for a module."""
    if not entry.startswith("re:"):
        return entry == name
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error as error:
        raise ModelError(f"{entry!r} in the quantization_config is no regular expression: {error}") from error
