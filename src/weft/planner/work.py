"""Work: what one rank of a layout streams and multiplies for a token, summed once per model, precision and cut."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import msgspec

from weft.architectures.axes import owned
from weft.architectures.kv import layer_bytes_per_token
from weft.architectures.parameters import Parameter, model_parameters
from weft.architectures.place import Place, Span
from weft.architectures.shape import ModelShape
from weft.formats.precision import OTHERS, parameter_bytes, similar_layers


class Product(msgspec.Struct, frozen=True):
    """A matrix that every token is multiplied with: its numbers, its bytes, and whether it is stored in 16 bits
    (or more) where the model's precision has fewer."""

    numbers: int
    nbytes: int
    wide: bool

    @property
    def bits(self) -> float:
        """Of a number, with its part of what it shares with others."""
        return 8 * self.nbytes / max(1, self.numbers)


class ExpertWork(msgspec.Struct, frozen=True, kw_only=True):
    """The routed experts of a layer: `held` of `count` on this rank, `top_k` chosen for each token; numbers and
    bytes are one expert's, as far as the rank holds it."""

    held: int
    count: int
    top_k: int
    numbers: int
    nbytes: float


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's attention on this rank. A cached token has `cache_bytes`; `decode_flops` are those of a new token
    for each token of its context, `prefill_flops` those for each pair of tokens of a prompt."""

    cache_bytes: int
    decode_flops: float
    prefill_flops: float
    window: int | None


class LayerWork(msgspec.Struct, frozen=True, kw_only=True):
    """`count` layers that are alike."""

    count: int
    products: tuple[Product, ...]
    experts: ExpertWork | None
    attention: Attention


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank does for a token."""

    hidden: int
    layers: tuple[LayerWork, ...]
    head: Product | None


@lru_cache(maxsize=8192)
def work(shape: ModelShape, precision: str, kv_dtype: str, place: Place) -> Work:
    """Work of one rank; `precision` is a result of `canonical` or `as_held` of `formats.precision`. Equal shares give
    the same object."""
    # What counts is how much a rank holds, not which: ranks of a stage, and stages, do equal work.
    names = ("q_heads", "kv_heads", "ffn", "vocab", "experts", "expert_ffn", "shared_ffn")
    spans = {name: Span(0, len(getattr(place, name))) for name in names}
    stage, stages = (1, 2) if place.last else (0, 2)
    share = msgspec.structs.replace(place, rank=0, tp_rank=0, stage=stage, stages=stages, layers=Span(0, 0), **spans)
    return _work(shape, precision, kv_dtype, share, kinds(shape, precision, place.layers))


Kind = tuple[bool, int | None, int]  # has experts, window, and the first layer that is stored alike


@lru_cache(maxsize=8192)
def kinds(shape: ModelShape, precision: str, layers: Span) -> tuple[tuple[Kind, int], ...]:
    """How many of these layers there are of each kind."""
    found: Counter[Kind] = Counter()
    for layer in range(layers.start, layers.stop):
        found[shape.has_experts(layer), shape.window(layer), similar_layers(shape, precision)[layer]] += 1
    return tuple(found.items())


@lru_cache(maxsize=8192)
def _work(shape: ModelShape, precision: str, kv_dtype: str, share: Place, held: tuple[tuple[Kind, int], ...]) -> Work:
    layers: dict[LayerWork, int] = {}
    for (has_experts, window, layer), count in held:
        products, experts = _layer(shape, precision, share, has_experts, layer)
        attention = _attention(shape, kv_dtype, share, window)
        alike = LayerWork(count=0, products=products, experts=experts, attention=attention)
        layers[alike] = layers.get(alike, 0) + count
    head = next(it for it in model_parameters(shape) if it.role == "head")
    return Work(
        hidden=shape.hidden,
        layers=tuple(msgspec.structs.replace(alike, count=count) for alike, count in layers.items()),
        head=_product(shape, precision, share, head, 0) if share.last else None,
    )


@lru_cache(maxsize=8192)
def _layer(
    shape: ModelShape, precision: str, place: Place, has_experts: bool, layer: int
) -> tuple[tuple[Product, ...], ExpertWork | None]:
    """The matrices of one layer, and its experts."""
    products, numbers, nbytes = [], 0, 0
    for parameter in model_parameters(shape):
        absent = parameter.on != "every" and (parameter.on == "expert") != has_experts
        if parameter.where != "layer" or absent or parameter.parts[0].cols is None:
            continue
        product = _product(shape, precision, place, parameter, layer)
        if parameter.role == "expert":
            numbers, nbytes = numbers + product.numbers, nbytes + product.nbytes
        else:
            products.append(product)
    if not has_experts or shape.experts is None:
        return tuple(products), None
    held = max(1, len(place.experts))
    of, top_k = shape.experts.count, shape.experts.top_k
    return tuple(products), ExpertWork(held=held, count=of, top_k=top_k, numbers=numbers, nbytes=nbytes / held)


def _product(shape: ModelShape, precision: str, place: Place, parameter: Parameter, layer: int) -> Product:
    rows = sum(len(owned(shape, place, part.rows)) for part in parameter.parts)
    cols = parameter.parts[0].cols
    assert cols is not None
    numbers = rows * len(owned(shape, place, cols))
    size = parameter_bytes(shape, precision, place, parameter, layer)
    return Product(numbers, size, precision not in OTHERS and size >= 2 * numbers)


def _attention(shape: ModelShape, kv_dtype: str, place: Place, window: int | None) -> Attention:
    heads = len(place.q_heads)
    if shape.mla:
        # Decode works on the cached vectors themselves, with the up-projections moved to the query and the output.
        rank, rope = shape.mla.kv_lora_rank, shape.mla.rope_dim
        key, value = rank + rope, rank
        prompt = shape.mla.nope_dim + rope + shape.mla.v_dim
    else:
        key = value = shape.head_dim
        prompt = key + value
    return Attention(
        cache_bytes=layer_bytes_per_token(shape, kv_dtype, place),
        decode_flops=2.0 * heads * (key + value),
        prefill_flops=2.0 * heads * prompt,
        window=window,
    )
