"""KV: the bytes that one token's keys and values take."""

from __future__ import annotations

from weft.architectures.place import Place, whole
from weft.architectures.shape import ModelShape
from weft.errors import ConfigError

# Bytes per number. FP8 caches of both kinds have one scale per tensor, which is not counted.
BYTES = {"bf16": 2, "fp16": 2, "bfloat16": 2, "float16": 2, "auto": 2, "fp32": 4, "float32": 4}
BYTES |= {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def number_bytes(dtype: str) -> int:
    """Bytes of one number of the cache. Raises ConfigError for an unknown dtype."""
    if dtype not in BYTES:
        raise ConfigError(f"unknown KV cache dtype {dtype!r}; known: {', '.join(BYTES)}")
    return BYTES[dtype]


def layer_bytes_per_token(shape: ModelShape, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one token in one layer: keys and values of the rank's KV heads; under latent attention the one
    vector that all heads share, the same on every tensor-parallel rank."""
    if shape.mla:
        return (shape.mla.kv_lora_rank + shape.mla.rope_dim) * number_bytes(dtype)
    heads = len(place.kv_heads) if place else shape.kv_heads
    return 2 * heads * shape.head_dim * number_bytes(dtype)


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one token in all layers of a rank, by default of the whole model, whatever their windows."""
    return layer_bytes_per_token(shape, dtype, place) * len((place or whole(shape)).layers)


def kv_bytes(shape: ModelShape, tokens: int, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one sequence of `tokens` on a rank: a layer with a window keeps no more tokens than that."""
    layers = (place or whole(shape)).layers
    kept = (min(tokens, shape.window(layer) or tokens) for layer in range(layers.start, layers.stop))
    return layer_bytes_per_token(shape, dtype, place) * sum(kept)
