"""Transformers' class of a model, built without memory for its weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_building = threading.Lock()  # the library sets torch's default dtype while it builds, for all threads


class ClassError(Exception):
    """A model that cannot be run through Transformers' class; the message is the reason."""


def read_config(text: str) -> PreTrainedConfig:
    """The configuration in a config.json's text. Raises ClassError if Transformers does not know its type."""
    values = json.loads(text)
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        own = "its class is code of the checkpoint, which Weft never runs" if "auto_map" in values else "unknown type"
        raise ClassError(f"Transformers {transformers.__version__} has no model_type {kind!r} ({own})")
    config: PreTrainedConfig = transformers.CONFIG_MAPPING[kind].from_dict(values)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ClassError(f"Transformers has no class that only writes text for the model_type {kind!r}")
    return config


def build_on_meta(config: PreTrainedConfig, attention: str, function: Callable[..., Any]) -> PreTrainedModel:
    """The model on torch's meta device, with `function` as its attention, registered under the name `attention`."""
    with _building, torch.device("meta"):
        AttentionInterface.register(attention, function)
        config.dtype = None  # the default, so that other threads never see another one
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model.train(False)
        return model


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model without its head."""
    base: PreTrainedModel = getattr(model, model.base_model_prefix)
    return base


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The layers of a model, and their name in its base model. Raises ClassError if there is no such list."""
    count = model.config.num_hidden_layers
    lists = [
        (name, child)
        for name, child in base_model(model).named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1:
        raise ClassError(f"{type(model).__name__} has no list of its {count} layers")
    return lists[0]


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers of a model their values, such as rotary frequencies. Raises ClassError if a value is missing."""
    for name, module in model.named_modules():
        buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not buffers:
            continue
        for key, buffer in buffers.items():
            empty = torch.full(buffer.shape, torch.nan if buffer.is_floating_point() else 0, dtype=buffer.dtype)
            setattr(module, key, empty)
        model._init_weights(module)
        for key in buffers:
            value = getattr(module, key)
            if not value.is_floating_point() or value.isnan().any():
                raise ClassError(f"Weft does not know the values of {name}.{key} of {type(model).__name__}")
            setattr(module, key, value.to(device))
