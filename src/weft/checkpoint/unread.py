"""Tensors of a checkpoint that a model of its shape does not read, by the part of the model that they belong to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.tensor_index import drafting_layers

PATTERNS = 5  # patterns of names in a message
# Parts that are left out on purpose, in words, and patterns that find the names of their tensors.
PARTS = {
    "its vision and audio parts": re.compile(
        r"^(model\.)?(visual|vision_\w+|vit|audio_\w+|(multi_modal|mm)_projector|embed_(vision|audio)|image_newline)(\.|$)"
    ),
    "the layers that predict further tokens (MTP)": re.compile(r"^(model\.)?mtp(_layers|_block)?\."),
    "buffers, which are computed here": re.compile(
        r"\.(rotary_emb\.(inv_freq|(cos|sin)_cached)|(attn|attention)\.(bias|masked_bias)|position_ids)$"
    ),
    "the scales of an FP8 KV cache, which has none here": re.compile(
        r"\.(self_attn\.[kvq]_scale|(k|v|q|qkv)_proj\.(output|k|v|q)_scale|attn\.[kvq]_scale|kv_scale)$"
    ),
}
# The same of checkpoints whose matrices are quantised.
QUANTISED_PARTS = {
    "its quantisation of activations, which are not rounded here": re.compile(
        r"\.(input_(scale|zero_point|scale_inv|global_scale)|activation_scale|weight_format)$"
    ),
    "its packed matrices, which are known without them": re.compile(r"\.(weight_shape|weight_zero_point|g_idx)$"),
}
NO_BIASES = "biases, which are all zeros"
MOST_BIAS_BYTES = 1 << 20  # of a bias that is read, to see whether it is all zeros
HEAD_COPY = "a copy of its embedding in the place of the head"


def unread_parts(
    index: Mapping[str, TensorInfo], read: Collection[str], shape: ModelShape
) -> tuple[dict[str, int], list[str]]:
    """Sort the tensors of `index` that are not in `read`.

    Returns the number of tensors of each part that is left out on purpose, by the part in words, and the names of all
    others. The layers that `drafting_layers` finds are in neither.
    """
    head = find_architecture(shape.architecture).names.head + ".weight"
    drafts = tuple(f"model.layers.{layer}." for layer in drafting_layers(index, len(shape.layers)))
    parts = PARTS | (QUANTISED_PARTS if shape.published else {})
    left_out, others = Counter[str](), list[str]()
    for name in sorted(index.keys() - set(read)):
        if name.startswith(drafts):
            continue
        part = next((part for part, pattern in parts.items() if pattern.search(name)), None)
        if part is None and shape.tied and name == head:
            part = HEAD_COPY
        if part is None and _is_zero_bias(name, index[name]):
            part = NO_BIASES
        if part is None:
            others.append(name)
        else:
            left_out[part] += 1
    return dict(left_out), others


def _is_zero_bias(name: str, info: TensorInfo) -> bool:
    """Return True for a bias of zeros, as AutoGPTQ writes them for layers without biases. Raises ModelError."""
    return name.endswith(".bias") and info.nbytes <= MOST_BIAS_BYTES and not any(read_tensor(info))


def describe_names(names: Collection[str]) -> str:
    """The patterns of tensors' names, with * for numbers, and how many names each has; the most frequent ones first."""
    patterns = Counter(re.sub(r"\d+", "*", name) for name in names).most_common()
    shown = [pattern if count == 1 else f"{pattern} ({count})" for pattern, count in patterns[:PATTERNS]]
    return ", ".join(shown) + (f" and {len(patterns) - PATTERNS} other patterns" if len(patterns) > PATTERNS else "")
