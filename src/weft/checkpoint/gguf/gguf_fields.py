"""Fields of a GGUF header as they are meant: one value for all layers, and no token for what is written as none."""

from __future__ import annotations

from weft.checkpoint.files import limits
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.gguf import Array, Gguf
from weft.errors import ModelError

# Arrays with a value for each layer in some files.
PER_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.sliding_window",
    "attention.value_length",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
)
NO_TOKEN = (-1, 2**32 - 1)  # ids that say that there is no such token, in a signed and an unsigned number


def own_fields(gguf: Gguf, prefix: str) -> Fields:
    """The fields of the file's architecture, without its `prefix`.

    Raises ModelError for a field that differs from layer to layer.
    """
    own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    for key in PER_LAYER:
        if isinstance(array := own.get(key), Array):
            values = set(gguf.array(prefix + key)) if array.count <= limits.LAYERS else ()
            if len(values) != 1:
                raise ModelError(
                    f"{gguf.path} has a {prefix}{key} per layer, which Weft does not compute; use another model",
                    code="gguf-field-per-layer",
                )
            own[key] = values.pop()
    return Fields(own, f"{gguf.path}: {prefix.removesuffix('.')}")


def token_fields(gguf: Gguf) -> Fields:
    """The fields of the file, without values that mean that there is no token."""
    return Fields({key: value for key, value in gguf.metadata.items() if value not in NO_TOKEN}, gguf.path)
