"""Bytes of the KV cache per token, per layer and per sequence."""

from __future__ import annotations

from weft.architectures.place import Place, whole
from weft.architectures.shape import ModelShape
from weft.errors import ConfigError

# Bytes per number. FP8 caches of both kinds have one scale per tensor, which is too small to count.
BYTES = {"bf16": 2, "fp16": 2, "bfloat16": 2, "float16": 2, "auto": 2, "fp32": 4, "float32": 4}
BYTES |= {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def number_bytes(dtype: str) -> int:
    """Bytes of one number in a KV cache of `dtype`. Raises ConfigError for an unknown dtype."""
    if dtype not in BYTES:
        raise ConfigError(f"unknown KV cache dtype {dtype!r}; known: {', '.join(BYTES)}", code="unknown-kv-cache-dtype")
    return BYTES[dtype]


def layer_bytes_per_token(shape: ModelShape, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one token in one layer: keys and values of the rank's KV heads (default: of all heads).

    Latent attention caches one vector that all heads share. Every tensor-parallel rank holds a copy of that vector.
    """
    if shape.latent:
        return (shape.latent.kv_lora_rank + shape.latent.rope_dim) * number_bytes(dtype)
    heads = len(place.kv_heads) if place else shape.kv_heads
    return 2 * heads * shape.head_dim * number_bytes(dtype)


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one token in all layers of a rank (default: of the whole model); sliding windows are ignored."""
    return layer_bytes_per_token(shape, dtype, place) * len((place or whole(shape)).layers)


def kv_bytes(shape: ModelShape, tokens: int, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one sequence of `tokens` tokens on a rank; a layer with a sliding window keeps at most its window."""
    layers = (place or whole(shape)).layers
    kept = (min(tokens, shape.layers[layer].window or tokens) for layer in range(layers.start, layers.stop))
    return layer_bytes_per_token(shape, dtype, place) * sum(kept)
