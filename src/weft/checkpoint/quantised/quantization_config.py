"""quantization_config: how GPTQ, AWQ, compressed-tensors, MXFP4 and FP8 describe quantised weights in a config.json.

Fields: GPTQModel's quantize_config, AutoAWQ's quant_config and compressed-tensors' quantization_config, as Transformers
writes them into `quantization_config`. `checkpoint.quantised.packed` reads the tensors themselves. `fp8_config`,
`signed_config` and `bitsandbytes_config` know the fields of these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised import bitsandbytes_config, fp8_config, signed_config
from weft.checkpoint.quantised.name_patterns import NAMES, PREFIX, ModuleList

BITS = (4, 8)
GROUPS = (32, 64, 128, 256, 512, 1024, ROW)  # columns that share a scale, in the schemes that have kernels
FP8_COLUMNS = fp8_config.COLUMNS
GROUP = 128  # default of GPTQ and AWQ
ORDERS = ("group", "dynamic", True)  # compressed-tensors' values of `actorder` for groups in order of activations
# The packings of each method that Weft reads.
PACKINGS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
READ = (
    "it reads GPTQ, AWQ (gemm) and compressed-tensors (pack-quantized) of 4 or 8 bits, MXFP4, FP8 (fp8, "
    "fbgemm_fp8, compressed-tensors float-quantized), bitsandbytes (nf4, fp4, int8) and compressed-tensors "
    "int-quantized"
)


def unsupported_quantization(config: Fields) -> str | None:
    """Description of a quantisation that Weft does not read, given the quantization_config; None if Weft reads it."""
    method = config.text_or("quant_method", None)
    if method == "compressed-tensors":
        return next(_unsupported_features(config), None)
    if method == "mxfp4":
        return None
    if method in fp8_config.METHODS:
        return fp8_config.unsupported_feature(config)
    if method == bitsandbytes_config.METHOD:
        return bitsandbytes_config.unsupported_feature(config)
    packings = PACKINGS.get(method or "")
    if packings is None:
        return method or "an unknown method (there is no quant_method)"
    return _unsupported_packing(config, method or "", packings)


def _unsupported_packing(config: Fields, method: str, packings: Collection[str]) -> str | None:
    bits, packing = _bits(config), _packing(config)
    if bits not in BITS or (method == "awq" and bits != 4):
        return f"{method} in {bits} bits"
    if packing not in packings:
        return f"{method} in the format {packing}"
    return None


def parse_quantization(config: Fields) -> PublishedQuantization:
    """Parse a quantization_config that Weft reads (`unsupported_quantization` is None), without its exceptions."""
    method = config.text_or("quant_method", None)
    if method == "mxfp4":
        return PublishedQuantization(method="mxfp4", bits=4, group=32, symmetric=True)
    if method in fp8_config.METHODS:
        return fp8_config.parse_config(config)
    if method == bitsandbytes_config.METHOD:
        return bitsandbytes_config.parse_config(config)
    if method == "compressed-tensors":
        return _parse_compressed(config)
    group = _group_columns(config, GROUP)
    if method == "awq":
        return PublishedQuantization(method="awq", bits=_bits(config), group=group, symmetric=False)
    return PublishedQuantization(
        method="gptq",
        bits=_bits(config),
        group=group,
        symmetric=config.flag("sym", True),
        ordered=config.flag("desc_act") and group != ROW and not config.flag("static_groups"),
        zero_offset=0 if _packing(config) == "gptq_v2" else 1,
        mixed=_has_overrides(config),
    )


def _parse_compressed(config: Fields) -> PublishedQuantization:
    """The first group of a compressed-tensors config; `mixed` if others are quantised otherwise."""
    weights, *others = (_group_weights(group) for group in _config_groups(config))
    mixed = any(other.values != weights.values for other in others)
    if fp8_config.is_floating(weights):
        return fp8_config.parse_weights(weights, mixed=mixed)
    if _is_signed(config):
        return signed_config.parse_weights(weights, mixed=mixed)
    group = _group_columns(weights, ROW)
    return PublishedQuantization(
        method="compressed-tensors",
        bits=weights.integer("num_bits"),
        group=group,
        symmetric=weights.flag("symmetric", True),
        ordered=weights.values.get("actorder") in ORDERS and group != ROW,
        mixed=mixed,
    )


def _has_overrides(config: Fields) -> bool:
    """Return True if GPTQ's "dynamic" quantises some layers in another way than the others."""
    dynamic = config.nested("dynamic")
    return dynamic is not None and any(not key.startswith("-:") for key in dynamic.values)


def precision_of_unsupported(config: Fields) -> str | None:
    """Precision (`checkpoint.quantised.precision`) with the bytes of a quantization_config that Weft does not read.

    None if its method's bytes are not known either.
    """
    return _float_precision(config) or _integer_precision(config)


def _float_precision(config: Fields) -> str | None:
    """fp8, mxfp4 or nvfp4, by the method's or the algorithm's name; None for another one."""
    method = config.text_or("quant_method", None)
    algorithm = (config.text_or("quant_algo", None) or config.text_or("format", None) or "").lower()
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if "fp4" in algorithm:
        return "mxfp4" if algorithm.startswith("mx") else "nvfp4"
    if "fp8" in algorithm or algorithm == "float-quantized":
        return "fp8"
    return None


def _integer_precision(config: Fields) -> str | None:
    """int4 or int8, by the number of bits; None for another number or type."""
    groups = config.nested("config_groups")
    first = next((value for value in groups.values.values() if isinstance(value, dict)), None) if groups else None
    weights = first.get("weights") if first else None
    fields = Fields(weights, f"{config.where}: weights") if isinstance(weights, dict) else config
    bits = fields.integer_or("bits", None) or fields.integer_or("num_bits", None)
    return f"int{bits}" if bits in (4, 8) and fields.text_or("type", "int") == "int" else None


def quantised_layer_predicate(config: Fields) -> Callable[[str], bool]:
    """Return a function that tells by the name of a linear layer if the config describes it as quantised."""
    method = config.text_or("quant_method", None)
    if method == "mxfp4":
        return lambda name: ".experts." in name
    if method == "awq":
        return _awq_predicate(config)
    if method in fp8_config.METHODS:
        return fp8_config.quantised_layer_predicate(config)
    if method == bitsandbytes_config.METHOD:
        return bitsandbytes_config.quantised_layer_predicate(config)
    if method == "compressed-tensors":
        return _compressed_predicate(config)
    return _gptq_predicate(config)


def _awq_predicate(config: Fields) -> Callable[[str], bool]:
    excluded = config.names("modules_to_not_convert")
    return lambda name: not name.endswith("lm_head") and not any(part in name for part in excluded)


def _compressed_predicate(config: Fields) -> Callable[[str], bool]:
    ignored = _module_list(config.names("ignore", NAMES), config)
    names = [target for group in _config_groups(config) for target in group.names("targets", NAMES)]
    targets = _module_list(names, config)
    return lambda name: ("Linear" in names or name in targets) and name not in ignored


def _module_list(entries: Collection[str], config: Fields) -> ModuleList:
    """Modules by compressed-tensors' entries: names, and regular expressions after "re:"."""
    names = [entry for entry in entries if not entry.startswith(PREFIX)]
    patterns = [entry.removeprefix(PREFIX) for entry in entries if entry.startswith(PREFIX)]
    return ModuleList(names, patterns, config.where)


def _gptq_predicate(config: Fields) -> Callable[[str], bool]:
    head, included = config.flag("lm_head"), _gptq_included(config)
    excluded = ModuleList((), _gptq_excluded(config), config.where)

    def is_quantised(name: str) -> bool:
        if name.endswith("lm_head"):
            return head
        if name in excluded:
            return False
        return not included or any(name.endswith("." + part) for part in included)

    return is_quantised


def _gptq_excluded(config: Fields) -> list[str]:
    """Patterns of the layers that GPTQ's "dynamic" leaves out."""
    dynamic = config.nested("dynamic")
    return [key.removeprefix("-:") for key in (dynamic.values if dynamic else {}) if key.startswith("-:")]


def _gptq_included(config: Fields) -> list[str]:
    """Names of the modules that GPTQ quantised in each block; [] for all."""
    groups = config.values.get("modules_in_block_to_quantize") or []
    if not isinstance(groups, list):
        raise config.wrong_value("modules_in_block_to_quantize", "a list of lists of names")
    return [str(name) for names in groups for name in (names if isinstance(names, list) else [names])]


def _bits(config: Fields) -> int:
    return config.integer_or("bits", None) or config.integer_or("w_bit", None) or 4


def _packing(config: Fields) -> str:
    """GPTQ's or AWQ's name of the layout of packed numbers, in lower case."""
    if config.flag("is_marlin_format"):
        return "marlin"
    awq = config.text_or("quant_method", None) == "awq"
    for key in ("version" if awq else "checkpoint_format", "format"):
        packing = config.text_or(key, None)
        if packing:
            return packing.lower()
    return "gemm" if awq else "gptq"


def _group_columns(config: Fields, default: int) -> int:
    """Number of columns that share a scale; ROW for -1 and null, which stand for a whole row."""
    key = "q_group_size" if "q_group_size" in config else "group_size"
    if config.values.get(key, default) in (-1, None):
        return ROW
    return config.integer_or(key, default) or ROW


def _config_groups(config: Fields) -> Iterator[Fields]:
    """The config groups of compressed-tensors: each says how some layers are quantised."""
    groups = config.nested("config_groups")
    if groups is None:
        return
    for name in groups.values:
        group = groups.nested(name)
        if group is not None:
            yield group


def _is_signed(config: Fields) -> bool:
    """Return True if the first group of a compressed-tensors config has 8-bit integers as they are."""
    packing = next(_config_groups(config)).text_or("format", None) or config.text_or("format", None)
    return packing == signed_config.PACKING


def _group_weights(group: Fields) -> Fields:
    return group.nested("weights") or Fields({}, group.where)


def _unsupported_features(config: Fields) -> Iterator[str]:
    """Describe each feature of a compressed-tensors config that Weft does not read."""
    format, groups = config.text_or("format", None), list(_config_groups(config))
    if not groups:
        yield f"compressed-tensors in the format {format}, without config_groups"
    for group in groups:
        yield from _unsupported_group(group, format)
    bits = {_group_weights(group).values.get("num_bits") for group in groups}
    if len(bits) > 1:
        yield f"compressed-tensors in {' and '.join(sorted(map(str, bits)))} bits, one here and one there"
    if len({fp8_config.is_floating(_group_weights(group)) for group in groups}) > 1:
        yield "compressed-tensors in whole and in floating-point numbers, one here and one there"
    sparsity = config.nested("sparsity_config")
    if sparsity is not None and sparsity.text_or("format", "dense") != "dense":
        yield f"compressed-tensors in the format {sparsity.text_or('format', None)}"


def _unsupported_group(group: Fields, format: str | None) -> Iterator[str]:
    """Describe each feature of one config group that Weft does not read; `format` is the whole config's."""
    weights, packing = _group_weights(group), group.text_or("format", None) or format
    bits, kind = weights.integer_or("num_bits", None), weights.text_or("type", "int")
    strategy = weights.text_or("strategy", None) or "group"
    if fp8_config.is_floating(weights):
        yield from fp8_config.unsupported_group(group, packing)
        return
    if packing == signed_config.PACKING:
        yield from signed_config.unsupported_group(group)
        return
    if packing != "pack-quantized":
        yield f"compressed-tensors in the format {packing}"
    if kind != "int" or bits not in BITS:
        yield f"compressed-tensors in {bits} bits ({kind})"
    if strategy not in ("group", "channel"):
        yield f"compressed-tensors with a scale for each {strategy}"
    if group.nested("input_activations") is not None:
        yield "compressed-tensors, and activations are quantised as well"
