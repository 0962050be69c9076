"""The published weight formats that Weft reads, and the quantization_config of a config.json by them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from weft.checkpoint.architectures.published import PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised import compressed_tensors
from weft.checkpoint.quantised.format import Format, Index, Predicate
from weft.checkpoint.quantised.formats import (
    awq,
    bitsandbytes,
    float_quantized,
    fp8,
    gptq,
    int_quantized,
    mxfp4,
    pack_quantized,
)
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS

# The formats, under the headings that they are listed with in refusals.
FORMATS: dict[str, tuple[Format, ...]] = {
    "{} of 4 or 8 bits": (gptq.FORMAT, awq.FORMAT, pack_quantized.FORMAT),
    "MXFP4": (mxfp4.FORMAT,),
    "FP8 ({})": (fp8.FORMAT, float_quantized.FORMAT),
    "bitsandbytes ({})": (bitsandbytes.FORMAT,),
    "compressed-tensors int-quantized": (int_quantized.FORMAT,),
}
ALL_FORMATS = tuple(chain.from_iterable(FORMATS.values()))
_BY_METHOD = {method: format for format in ALL_FORMATS if not format.packings for method in format.methods}
_PACKINGS = {packing: format for format in ALL_FORMATS for packing in format.packings}


def _listed() -> str:
    """The formats in the words of a refusal."""

    rows = {heading: [format.listed for format in formats] for heading, formats in FORMATS.items()}
    return _join_words(
        [heading.format(", ".join(names) if "(" in heading else _join_words(names)) for heading, names in rows.items()]
    )


def _join_words(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _vllm_methods() -> Iterator[tuple[str, str]]:
    """Yield (name, method) of vLLM's --quantization, but for the names that mean rounding while weights are loaded."""
    for formats in FORMATS.values():
        methods = (method for format in formats for method in format.methods)
        yield from ((method, method) for method in methods if method not in ONLINE_QUANTIZATIONS)
        yield from ((name, format.methods[0]) for format in formats for name in format.vllm)


READ = f"it reads {_listed()}"
# vLLM's --quantization values for published checkpoints. Weft uses its own kernels for all of them.
METHODS = dict(_vllm_methods())
QUANTIZATIONS = ("auto", "none", *ONLINE_QUANTIZATIONS, *METHODS)
# Names of precisions that come from formats; with COPIES, suffixes of the names of quantised copies.
FORMAT_ALIASES = {name: precision for format in ALL_FORMATS for name, precision in format.aliases.items()}
COPIES = FORMAT_ALIASES | {name: precision for format in ALL_FORMATS for name, precision in format.copies.items()}


def unsupported_quantization(config: Fields) -> str | None:
    """Description of a quantisation that Weft does not read, given the quantization_config; None if Weft reads it."""
    method = config.text_or("quant_method", None)
    if method == compressed_tensors.METHOD:
        return next(compressed_tensors.unsupported_features(config, _PACKINGS), None)
    format = _BY_METHOD.get(method or "")
    if format is None:
        return method or "an unknown method (there is no quant_method)"
    return format.unsupported(config)


def parse_quantization(config: Fields) -> PublishedQuantization:
    """Parse a quantization_config that Weft reads (`unsupported_quantization` is None), without its exceptions."""
    method = config.text_or("quant_method", None)
    if method == compressed_tensors.METHOD:
        return compressed_tensors.parse_config(config, _PACKINGS)
    return _BY_METHOD[method or ""].parse(config)


def quantised_layer_predicate(config: Fields) -> Predicate:
    """Return a function that tells by the name of a linear layer if the config describes it as quantised."""
    method = config.text_or("quant_method", None)
    return next(format for format in ALL_FORMATS if method in format.methods).quantised_layers(config)


def join_matrices(index: Index, published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace the tensors of each quantised matrix in an index by one `Packed`. Raises ModelError, naming the tensor,
    if the tensors of a matrix do not fit together."""
    own = next(it for it in ALL_FORMATS if published.method in it.methods and published.numbers in it.numbers)
    return own.join(index, published)


def find_packed_name(index: Index, name: str) -> str | None:
    """Name of the tensor with the packed numbers of the matrix `name`; None if the index has none."""
    layer = name.removesuffix("weight")
    names = (it.stored_name.format(layer=layer, name=name) for it in ALL_FORMATS if it.stored_name)
    return next((stored for stored in names if stored in index), None)


def precision_of_unsupported(config: Fields) -> str | None:
    """Precision (`checkpoint.quantised.precision`) with the bytes of a quantization_config that Weft does not read.

    None if its method's bytes are not known either.
    """
    return _float_precision(config) or _integer_precision(config)


def _float_precision(config: Fields) -> str | None:
    """fp8, mxfp4 or nvfp4, by the method's or the algorithm's name; None for another one."""
    method = config.text_or("quant_method", None)
    algorithm = (config.text_or("quant_algo", None) or config.text_or("format", None) or "").lower()
    if method in fp8.FORMAT.methods:
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
