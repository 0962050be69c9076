"""Modules: what Transformers calls the parts of a model, and which tensors lie in each.

Source: the modelling files of Transformers 5.23. Where its modules have other names than a checkpoint's tensors
(GPT-2, Mixtral, models that also see pictures) both are known, the modules' first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import msgspec

from weft.architectures.names import NAMES
from weft.architectures.parameters import Parameter, model_parameters
from weft.architectures.shape import ModelShape

_SEEING = ((r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head\.", "lm_head."))
_MIXTRAL = ((r"\.block_sparse_moe\.", ".mlp."),)
# From the names of tensors to those of modules, by architecture.
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "GPT2LMHeadModel": ((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
    "MixtralForCausalLM": _MIXTRAL,
    "MiniMaxM2ForCausalLM": _MIXTRAL,
    "Gemma3ForConditionalGeneration": _SEEING,
    "Mistral3ForConditionalGeneration": _SEEING,
}
# Modules without weights,
EMPTY = {"rotary_emb", "act", "act_fn", "activation_fn", "drop", "dropout"}
EMPTY |= {"attn_dropout", "resid_dropout", "resid_attn_dropout", "resid_mlp_dropout"}
# and those of models that also see pictures, which Weft leaves out.
SEEING = {"vision_tower", "vision_model", "multi_modal_projector"}

EXPERT = "{expert}"  # in the name of a tensor that each expert has


class PipelineUnit(msgspec.Struct, frozen=True, kw_only=True):
    """What no pipeline cuts: the embedding, a layer with its number, the last norm or the head. `tensors` are the
    names of each of its tensors, the module's first."""

    kind: Literal["embedding", "layer", "norm", "head"]
    name: str
    tensors: tuple[tuple[str, ...], ...]
    layer: int | None = None


@lru_cache(maxsize=8)
def pipeline_units(shape: ModelShape) -> tuple[PipelineUnit, ...]:
    """All of a model, in the order of the forward pass: embedding, layers, norm, head."""
    table = model_parameters(shape)
    embedding = [it for it in table if it.where == "embed"]
    norm = [it for it in table if it.where == "head" and it.role != "head"]
    head = _names(shape, NAMES[shape.architecture].head + ".weight")
    return (
        _unit(shape, "embedding", embedding),
        *(_layer(shape, layer) for layer in range(shape.layers)),
        _unit(shape, "norm", norm),
        PipelineUnit(kind="head", name=head[0].removesuffix(".weight"), tensors=(head,)),
    )


def _layer(shape: ModelShape, layer: int) -> PipelineUnit:
    held = [it for it in model_parameters(shape) if it.where == "layer" and it.is_in(shape, layer)]
    unit = _unit(shape, "layer", held, layer)
    words = unit.tensors[0][0].split(".")
    return msgspec.structs.replace(unit, name=".".join(words[: words.index(str(layer)) + 1]), layer=layer)


def _unit(
    shape: ModelShape, kind: Literal["embedding", "layer", "norm"], held: list[Parameter], layer: int = 0
) -> PipelineUnit:
    sources = dict.fromkeys(part.source for parameter in held for part in parameter.parts)
    tensors = tuple(_names(shape, source.replace("{layer}", str(layer))) for source in sources)
    return PipelineUnit(kind=kind, name=tensors[0][0].rpartition(".")[0], tensors=tensors)


def _names(shape: ModelShape, source: str) -> tuple[str, ...]:
    renamed = source
    for pattern, name in RENAMED.get(shape.architecture, ()):
        renamed = re.sub(pattern, name, renamed)
    return tuple(dict.fromkeys((renamed, source)))


def enclosing_modules(name: str) -> Iterator[str]:
    """A tensor's own name and those of the modules around it, down to "", the whole model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


@lru_cache(maxsize=8)
def module_names(shape: ModelShape) -> frozenset[str]:
    """Every module that holds weights, and every tensor; an expert's number is EXPERT."""
    tensors = (name for unit in pipeline_units(shape) for tensor in unit.tensors for name in tensor)
    return frozenset(name for tensor in tensors for name in enclosing_modules(tensor))


def holds_weights(shape: ModelShape, module: str) -> bool | None:
    """Whether a module, or a tensor, is part of this model; False for one without weights of Weft's, None for one
    that is not known."""
    known, words = module_names(shape), module.split(".")
    if generic_name(shape, module) in known:
        return True
    for position, word in enumerate(words):
        if word in SEEING and shape.architecture.endswith("ForConditionalGeneration"):
            return False
        if word in EMPTY and generic_name(shape, ".".join(words[:position])) in known:
            return False
    return None


def generic_name(shape: ModelShape, module: str) -> str:
    """The module's name with EXPERT in the place of an expert's number, where the model has an expert of it."""
    count = shape.experts.count if shape.experts else 0

    def anonymous(match: re.Match[str]) -> str:
        return f".experts.{EXPERT}" if int(match[1]) < count else match[0]

    return re.sub(r"\.experts\.(\d+)(?=\.|$)", anonymous, module)
