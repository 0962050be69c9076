"""Transformers' module names of a model's parts, and the tensors in each module.

Source: the modelling files of Transformers 5.23. If modules are named otherwise than the checkpoint's tensors (GPT-2,
Mixtral, vision-language models), both names are known, the module's name first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from weft.checkpoint.architectures.parameters import Parameter, layer_parameters, outer_parameters
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape

# Modules without weights.
EMPTY = {"rotary_emb", "act", "act_fn", "activation_fn", "drop", "dropout"}
EMPTY |= {"attn_dropout", "resid_dropout", "resid_attn_dropout", "resid_mlp_dropout"}
# Modules of vision-language models that Weft leaves out.
VISION = {"vision_tower", "vision_model", "multi_modal_projector"}

EXPERT = "{expert}"  # stands for an expert's number in the name of a tensor


class PipelineUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a model that no pipeline cuts: the embedding, a layer, the final norm or the head.

    `tensors` has an entry per tensor: all its names, Transformers' module name first. `layer` is the layer's number.
    """

    kind: Literal["embedding", "layer", "norm", "head"]
    name: str
    tensors: tuple[tuple[str, ...], ...]
    layer: int | None = None


@lru_cache(maxsize=8)
def pipeline_units(shape: ModelShape) -> tuple[PipelineUnit, ...]:
    """All units of a model, in the order of the forward pass: embedding, layers, final norm if there is one, head."""
    table = outer_parameters(shape)
    embedding = [parameter for parameter in table if parameter.where == "embed"]
    norm = [parameter for parameter in table if parameter.where == "head" and parameter.role != "head"]
    head = _tensor_names(shape, find_architecture(shape.architecture).names.head + ".weight")
    return (
        _unit(shape, "embedding", embedding),
        *(_layer(shape, layer) for layer in range(len(shape.layers))),
        *([_unit(shape, "norm", norm)] if norm else []),
        PipelineUnit(kind="head", name=head[0].removesuffix(".weight"), tensors=(head,)),
    )


def _layer(shape: ModelShape, layer: int) -> PipelineUnit:
    unit = _unit(shape, "layer", layer_parameters(shape, layer), layer)
    # "model.layers.3.self_attn..." is in "model.layers.3".
    words = unit.tensors[0][0].split(".")
    return msgspec.structs.replace(unit, name=".".join(words[: words.index(str(layer)) + 1]), layer=layer)


def _unit(
    shape: ModelShape, kind: Literal["embedding", "layer", "norm"], held: Sequence[Parameter], layer: int = 0
) -> PipelineUnit:
    sources = dict.fromkeys(part.source for parameter in held for part in parameter.parts)
    tensors = tuple(_tensor_names(shape, source.replace("{layer}", str(layer))) for source in sources)
    return PipelineUnit(kind=kind, name=tensors[0][0].rpartition(".")[0], tensors=tensors)


def _tensor_names(shape: ModelShape, source: str) -> tuple[str, ...]:
    """All names of a tensor: Transformers' own, and the checkpoint's `source` if that differs."""
    renamed = source
    for pattern, name in find_architecture(shape.architecture).modules:
        renamed = re.sub(pattern, name, renamed)
    return tuple(dict.fromkeys((renamed, source)))


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield a tensor's own name, then the modules around the tensor, innermost first, ending with "" (the model)."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


@lru_cache(maxsize=8)
def module_names(shape: ModelShape) -> frozenset[str]:
    """Names of all tensors and of all modules that hold weights; EXPERT stands for an expert's number."""
    tensors = (name for unit in pipeline_units(shape) for tensor in unit.tensors for name in tensor)
    return frozenset(name for tensor in tensors for name in enclosing_modules(tensor))


def holds_weights(shape: ModelShape, module: str) -> bool | None:
    """Return True for a module or tensor of this model, False for a module without weights, None for an unknown name.

    The vision modules of a vision-language model count as modules without weights.
    """
    known, words = module_names(shape), module.split(".")
    if generic_name(shape, module) in known:
        return True
    for position, word in enumerate(words):
        if word in VISION and shape.architecture.endswith("ForConditionalGeneration"):
            return False
        if word in EMPTY and generic_name(shape, ".".join(words[:position])) in known:
            return False
    return None


def generic_name(shape: ModelShape, module: str) -> str:
    """Replace an expert's number in a module's name by EXPERT, if the model has an expert of that number."""
    count = shape.experts.count if shape.experts else 0

    def anonymous(match: re.Match[str]) -> str:
        return f".experts.{EXPERT}" if int(match[1]) < count else match[0]

    return re.sub(r"\.experts\.(\d+)(?=\.|$)", anonymous, module)
