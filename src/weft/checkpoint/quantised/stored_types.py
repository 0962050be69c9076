"""Types of the tensors of a model whose checkpoint is quantised: by its config.json, and by the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from weft.checkpoint.architectures.parameters import Parameter, model_parameters
from weft.checkpoint.architectures.published import ORDERED, PublishedQuantization, held_group, scheme_name
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import Packed
from weft.checkpoint.quantised.registry import parse_quantization, quantised_layer_predicate
from weft.checkpoint.quantised.schemes import TABLES

QUANTISABLE = ("linear", "expansion", "expert", "head")  # roles of parameters that may be quantised


def with_stored_types(shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """Correct the shape's `published` by the schemes that the checkpoint's tensors really have.

    Tensors that are missing in `tensors` count as the config describes them.
    """
    if shape.published is None:
        return shape
    roles = {name: parameter.role for name, parameter in matrices(shape)}
    schemes = {name: shape.published.stored_as(name, role) for name, role in roles.items()}
    for name, info in tensors.items():
        if name in roles:
            schemes[name] = info.type if isinstance(info, Packed) else ""
    counts = Counter(scheme for name, scheme in schemes.items() if scheme and roles[name] != "head")
    most_common = max(counts, key=lambda scheme: counts[scheme], default=shape.published.scheme)
    if most_common != shape.published.scheme:
        published = _like_tensors(shape.published, tensors, most_common)
        shape = msgspec.structs.replace(shape, published=published)
    return _with_exceptions(shape, schemes)


def _like_tensors(
    published: PublishedQuantization, tensors: Mapping[str, TensorInfo], scheme: str
) -> PublishedQuantization:
    """The published quantisation with the figures of the packed tensors in this scheme."""
    packed = next(info for info in tensors.values() if isinstance(info, Packed) and info.type == scheme)
    return msgspec.structs.replace(
        published,
        bits=packed.bits,
        group=packed.group,
        symmetric=packed.symmetric,
        ordered=packed.type.endswith(ORDERED),
    )


def with_config_types(shape: ModelShape, config: Fields) -> ModelShape:
    """Set the shape's `published` as a quantization_config describes it; Weft must be able to read the method."""
    published, is_quantised = parse_quantization(config), quantised_layer_predicate(config)
    schemes = {}
    for name, parameter in matrices(shape):
        quantised = parameter.role in QUANTISABLE and is_quantised(name.removesuffix(".weight"))
        schemes[name] = _scheme_in_config(shape, published, parameter) if quantised else ""
    return _with_exceptions(msgspec.structs.replace(shape, published=published), schemes)


def _scheme_in_config(shape: ModelShape, published: PublishedQuantization, parameter: Parameter) -> str:
    """Scheme of a quantised matrix; bitsandbytes' blocks run along the whole matrix, whose columns may cut them."""
    cols = parameter.parts[0].cols
    if published.numbers not in TABLES or cols is None:
        return published.scheme
    return scheme_name(published.numbers, held_group(published.group, cols.length))


def _with_exceptions(shape: ModelShape, schemes: Mapping[str, str]) -> ModelShape:
    """Record as exceptions the tensors whose scheme is not the usual one; `schemes` has all matrices."""
    assert shape.published is not None
    usual = msgspec.structs.replace(shape.published, exceptions=())
    exceptions = {}
    for name, parameter in matrices(shape):
        if schemes[name] != usual.stored_as(name, parameter.role):
            exceptions[name] = schemes[name]
    published = msgspec.structs.replace(usual, exceptions=tuple(exceptions.items()))
    return msgspec.structs.replace(shape, published=published)


def stored_types(shape: ModelShape) -> dict[str, str]:
    """Scheme of each quantised tensor of a checkpoint of this shape, by name."""
    if shape.published is None:
        return {}
    schemes = {name: shape.published.stored_as(name, parameter.role) for name, parameter in matrices(shape)}
    return {name: scheme for name, scheme in schemes.items() if scheme}


def matrices(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    """Yield (tensor name, parameter) of a model's matrices, without a tied head; the first expert stands for all."""
    for parameter, layer in model_parameters(shape):
        if parameter.role == "head" and shape.tied:
            continue
        for part in parameter.parts:
            if part.cols is not None:
                yield part.source.format(layer=layer, expert=0), parameter
