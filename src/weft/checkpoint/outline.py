"""Outline: the size of a checkpoint of any architecture, from the headers of its files and its config alone.

Weights are summed exactly. The KV cache is estimated from the usual fields of a config (number of layers, KV heads and
their dims). It is a range: layers may cache all tokens, a window of them, a compressed form, or a state instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import msgspec

from weft.checkpoint import checkpoint
from weft.checkpoint.config import config_json
from weft.checkpoint.files import gguf, safetensors
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.hub import hub, model_names
from weft.errors import ModelError

PATIENCE = 30.0  # seconds to wait for the headers of a repository's files
KV_NUMBER = 2  # bytes: the cache is counted in 16 bits, states in 32
STATE_NUMBER = 4
LAYER = re.compile(r"(?:^|\.)(\d+)\.")  # the first number in a tensor's name is its layer's
# Names of one field in the configs of different models; GGUF's last.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "block_count")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention.head_count")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "attention.head_count_kv")
HEAD_DIM = ("head_dim", "kv_channels", "d_head", "attention.key_length")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embedding_length")
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "context_length")
STATE = ("state_size", "mamba_d_state", "ssm_state_size", "d_state", "ssm.state_size")
STATE_WIDTH = ("ssm.inner_size", "intermediate_size", "d_inner")
LATENT = ("kv_lora_rank", "attention.kv_lora_rank")
ROPE = ("qk_rope_head_dim", "rope.dimension_count")
EXPERTS = re.compile("expert|_exps|moe", re.IGNORECASE)  # in names of fields and of tensors
NO_EXPERTS: tuple[object, ...] = (None, 0, 1, "", [])
KINDS = ("layer_types", "layers_block_type", "hybrid_layer_pattern")
WINDOWS = ("sliding_window", "attention.sliding_window", "full_attention_interval")


class KVEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a model remembers: per token, from `low` to `high`, and per sequence, however long. `reason` says what
    they follow from, and what is uncertain. If the bytes per token are not `known`, both are 0."""

    low: int
    high: int
    state: int
    reason: str
    known: bool = True


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose architecture Weft does not know.

    - `layer_bytes`: of each layer's weights; `other_bytes` of all other tensors. Exact, but for `equal_layers`: only
      the sum is known, and is divided evenly.
    - `mixture`: it has experts, of which a token takes an unknown part.
    - `params`: number of stored numbers, of which packed ones count as the integers that hold them; None if not
      counted.
    - `context`: tokens of the longest sequence; None if the config does not say.
    """

    name: str
    architecture: str
    source: str
    layer_bytes: tuple[int, ...]
    other_bytes: int
    params: int | None
    equal_layers: bool
    mixture: bool
    kv: KVEstimate
    context: int | None

    @property
    def weight_bytes(self) -> int:
        return sum(self.layer_bytes) + self.other_bytes


def read_outline(
    model: str, *, revision: str | None = None, hf_token: str | None = None, patience: float = PATIENCE
) -> Outline:
    """Outline of a directory, a .gguf file, or a repository of the hub, which is asked for at most `patience` seconds
    unless its weights are here. Raises ModelError if the weights are nowhere, or the config tells no number of layers.
    """
    path = checkpoint.local_path(model)
    if path is None:
        name = model_names.full_name(model)
        path = None if revision else _fetched(name)
        if path is None:
            return _from_hub(name, revision, hf_token, patience)
    if path.is_dir():
        fields = _text_fields(config_json.load_config(path))
        index = safetensors.read_directory(path)
        names = config_json.load_config(path).values.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else str(fields.values.get("model_type"))
        return _from_tensors(model, architecture, str(path), fields, index)
    header = gguf.read_gguf(path)
    architecture = str(header.metadata.get("general.architecture"))
    own = {
        key.removeprefix(architecture + "."): header.array(key) if isinstance(value, gguf.Array) else value
        for key, value in header.metadata.items()
        if key.startswith(architecture + ".")
    }
    return _from_tensors(model, architecture, str(path), Fields(own, str(path)), header.tensors)


def _fetched(name: str) -> Path | None:
    """Directory of a repository in the hub's cache; None if it is not there, or not with all its weights."""
    folder = hub.cached_repository(name)
    if folder is None or not any(folder.glob("*.safetensors")):
        return None
    try:
        safetensors.read_directory(folder)
    except ModelError:
        return None
    return folder


def _from_tensors(
    name: str, architecture: str, source: str, fields: Fields, index: Mapping[str, TensorInfo]
) -> Outline:
    layers = _layer_count(fields)
    each, other = [0] * layers, 0
    for tensor, info in index.items():
        match = LAYER.search(tensor)
        if match and int(match[1]) < layers:
            each[int(match[1])] += info.nbytes
        else:
            other += info.nbytes
    return Outline(
        name=name,
        architecture=architecture,
        source=source,
        layer_bytes=tuple(each),
        other_bytes=other,
        params=sum(prod(info.dims) for info in index.values()),
        equal_layers=False,
        mixture=_has_experts(fields.values) or any(EXPERTS.search(tensor) for tensor in index),
        kv=estimate_kv(fields, layers),
        context=_number(fields, CONTEXT),
    )


def _from_hub(name: str, revision: str | None, token: str | None, patience: float) -> Outline:
    # Here: it imports HTTP and TLS, which most look-ups do without.
    from weft.checkpoint.hub import headers as hub_headers

    description = hub_headers.describe_repository(name, revision=revision, token=token, patience=patience)
    fields, stored = _text_fields(description.config), description.stored_bytes
    if stored is None:
        raise ModelError(
            f"{description.config.where}: no headers of safetensors files, from which weights are summed; "
            f"{hub.WAYS_OUT}",
            code="no-safetensors-headers",
        )
    names, layers = description.config.values.get("architectures"), _layer_count(fields)
    return Outline(
        name=name,
        architecture=str(names[0]) if isinstance(names, list) and names else str(fields.values.get("model_type")),
        source=description.config.where,
        layer_bytes=(stored // layers,) * layers,
        other_bytes=stored % layers,
        params=None,
        equal_layers=True,
        mixture=_has_experts(fields.values),
        kv=estimate_kv(fields, layers),
        context=_number(fields, CONTEXT),
    )


def estimate_kv(fields: Fields, layers: int) -> KVEstimate:
    """Estimate the KV of a model of `layers` layers from the fields of its config."""
    state = _state_bytes(fields, layers)
    heads, kv_heads = _numbers(fields, HEADS, layers), _numbers(fields, KV_HEADS, layers)
    if heads is None:
        known = "and no state; bytes per token are unknown" if not state else "so no KV cache, but a state per sequence"
        reason = f"the config has no attention heads, {known}"
        return KVEstimate(low=0, high=0, state=state, reason=reason, known=bool(state))
    if kv_heads is None:
        kv_heads = (1,) * layers if fields.values.get("multi_query") is True else heads
    width = _head_dim(fields, heads)
    if width is None:
        reason = "the config tells no width of heads: KV bytes are unknown"
        return KVEstimate(low=0, high=0, state=state, reason=reason, known=False)
    high = sum(2 * count * width * KV_NUMBER for count in kv_heads)
    low, reasons = _least_kv_bytes(fields, layers, high)
    if state:
        low = low if _full_layers(fields, layers) is not None else 0
        reasons.append("some layers have a state per sequence instead")
    return KVEstimate(low=low, high=high, state=state, reason=", ".join(reasons))


def _least_kv_bytes(fields: Fields, layers: int, high: int) -> tuple[int, list[str]]:
    """The fewest bytes per token, if `high` are the bytes of keys and values in every layer, and the reasons for
    both."""
    every = "every layer caches keys and values of every token"
    latent, full = _number(fields, LATENT), _full_layers(fields, layers)
    if latent is not None:
        low = layers * (latent + (_number(fields, ROPE) or 0)) * KV_NUMBER
        return low, [every, "or a compressed form of them (kv_lora_rank)"]
    if full is not None:
        return high * full[0] // layers, [every, full[1]]
    return high, [every]


def _full_layers(fields: Fields, layers: int) -> tuple[int, str] | None:
    """Number of layers that certainly cache all tokens, and the reason to doubt the others; None without doubts."""
    for key in KINDS:
        kinds = fields.values.get(key)
        if isinstance(kinds, list) and len(kinds) == layers:
            full = sum("attention" in str(kind) and not re.search("linear|sliding|chunk", str(kind)) for kind in kinds)
            return full, f"or only {full} of {layers} layers do ({key})"
    if fields.values.get("use_sliding_window") is False:
        return None
    doubts = [key for key in WINDOWS if fields.values.get(key)]
    return (0, f"or less beyond a window ({doubts[0]})") if doubts else None


def _has_experts(values: Mapping[str, object]) -> bool:
    """Return True if a config counts experts, in a group of its fields or outside of them."""
    return any(
        _has_experts(value) if isinstance(value, dict) else bool(EXPERTS.search(key) and value not in NO_EXPERTS)
        for key, value in values.items()
    )


def _state_bytes(fields: Fields, layers: int) -> int:
    """Bytes of the states of one sequence, if all layers have one; 0 if the config has none."""
    size = _number(fields, STATE)
    if size is None:
        return 0
    hidden, expand = _number(fields, HIDDEN) or 0, fields.values.get("expand", fields.values.get("mamba_expand", 2))
    widened = int(hidden * expand) if isinstance(expand, int | float) else 2 * hidden
    return layers * (_number(fields, STATE_WIDTH) or widened) * size * STATE_NUMBER


def _head_dim(fields: Fields, heads: Iterable[int]) -> int | None:
    own, hidden = _number(fields, HEAD_DIM), _number(fields, HIDDEN)
    return own or (hidden // max(heads) if hidden and max(heads) else None)


def _layer_count(fields: Fields) -> int:
    layers = _number(fields, LAYERS)
    if layers is None or layers > 10_000:
        raise ModelError(
            f"{fields.where} tells no number of layers ({', '.join(LAYERS[:4])}); nothing can be planned without",
            code="no-layer-count",
        )
    return layers


def _text_fields(config: Fields) -> Fields:
    """The fields of the language model, which are inside the fields of a model that sees or hears."""
    for key in ("text_config", "llm_config", "language_config"):
        if _number(config, LAYERS) is None and isinstance(config.values.get(key), dict):
            return config.nested(key) or config
    return config


def _number(fields: Fields, names: Iterable[str]) -> int | None:
    """The first of some fields that is a positive whole number; of a list with a number per layer, the largest."""
    for name in names:
        value = fields.values.get(name)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _numbers(fields: Fields, names: Iterable[str], layers: int) -> tuple[int, ...] | None:
    """The first of some fields for each layer; None if there is none, or all are 0."""
    for name in names:
        value = fields.values.get(name)
        if isinstance(value, list) and len(value) == layers and any(value):
            return tuple(item if isinstance(item, int) else 0 for item in value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return (value,) * layers
    return None
