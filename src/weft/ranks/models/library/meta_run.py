"""One run of a model of Transformers on torch's meta device: it shows how layers hand on their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from weft.ranks.models.library.build import ClassError, base_model, layer_list


class MetaRun(NamedTuple):
    """The findings of a run.

    - `single`: each layer hands on its hidden states alone.
    - `siblings`: groups of linear modules that read the same tensor, in every layer.
    """

    single: bool
    siblings: tuple[tuple[str, ...], ...]


@torch.inference_mode()
def run_on_meta(model: PreTrainedModel) -> MetaRun:
    """Run the layers for two tokens."""
    alone: list[bool] = []
    _, layers = layer_list(model)
    layers[0].register_forward_hook(lambda module, inputs, output: alone.append(isinstance(output, torch.Tensor)))
    inputs = [note_inputs(layer) for layer in layers]
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        base_model(model)(input_ids=tokens, position_ids=tokens, use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ClassError(f"{type(model).__name__} does not run without its weights: {reason:.160}") from error
    shared = [siblings_of(seen) for seen in inputs]
    return MetaRun(all(alone), tuple(group for group in shared[0] if all(group in others for others in shared)))


def note_inputs(layer: nn.Module) -> list[tuple[str, Any]]:
    """Return a list to which each linear module of a layer adds its path and its input when it runs."""
    seen: list[tuple[str, Any]] = []

    def note(path: str, inputs: tuple[Any, ...]) -> None:
        seen.append((path, inputs[0] if inputs else None))

    for path, module in layer.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(lambda module, inputs, path=path: note(path, inputs))
    return seen


def siblings_of(seen: Sequence[tuple[str, Any]]) -> list[tuple[str, ...]]:
    """Groups of paths whose inputs were one and the same tensor, each in the order of its calls."""
    groups: dict[int, list[str]] = {}
    for path, tensor in seen:
        if tensor is None:  # given by name
            continue
        groups.setdefault(id(tensor), []).append(path)
    return [tuple(paths) for paths in groups.values() if 1 < len(paths) == len(set(paths))]
