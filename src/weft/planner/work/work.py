"""RankWork: bytes that one rank streams and numbers that it multiplies per token, summed once per model and cut."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import msgspec

from weft.checkpoint.architectures.kv import mixer_spec
from weft.checkpoint.architectures.parameters import Parameter, layer_parameters, outer_parameters
from weft.checkpoint.architectures.place import HeadSpans, Place, Span
from weft.checkpoint.architectures.shape import Experts, LatentAttention, Mixer, ModelShape
from weft.checkpoint.quantised.precision import OTHERS, parameter_bytes, similar_layers


class MatrixProduct(msgspec.Struct, frozen=True):
    """A matrix that every token is multiplied with: its count of numbers and its bytes.

    `wide`: stored in 16 bits or more, so it gets the speeds of 16-bit weights; always false for precision fp32.
    """

    numbers: int
    nbytes: int
    wide: bool

    @property
    def bits(self) -> float:
        """Bits per number, with the number's part of its group's scale."""
        return 8 * self.nbytes / max(1, self.numbers)


class ExpertWork(msgspec.Struct, frozen=True, kw_only=True):
    """The routed experts of a layer: `held` of `count` on this rank, `top_k` chosen per token. `numbers` and `nbytes`
    are a single expert's, as far as the rank holds it."""

    held: int
    count: int
    top_k: int
    numbers: int
    nbytes: float


class AttentionWork(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's attention on this rank. `cache_bytes` are the bytes of one cached token, `decode_flops` the operations
    of a new token per token of its context, `prefill_flops` the operations per pair of tokens of a prompt."""

    cache_bytes: int
    decode_flops: float
    prefill_flops: float
    window: int | None


class LayerWork(msgspec.Struct, frozen=True, kw_only=True):
    """`count` layers that do equal work, each with `sums` all-reduces among the ranks of its stage."""

    count: int
    sums: int
    products: tuple[MatrixProduct, ...]
    experts: ExpertWork | None
    attention: AttentionWork


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """All work of a rank per token: its layers, grouped by equal work, and the head if the rank has one."""

    hidden: int
    layers: tuple[LayerWork, ...]
    head: MatrixProduct | None


@lru_cache(maxsize=8192)
def rank_work(shape: ModelShape, precision: str, kv_dtype: str, place: Place) -> RankWork:
    """The work of one rank. Equal shares give the same object.

    `precision` is a result of `canonical` or `held_precision` of `checkpoint.quantised.precision`.
    """
    # Only the size of a rank's share counts, not its position: ranks of a stage, and stages, do equal work.
    names = ("q_heads", "kv_heads", "ffn", "vocab", "experts", "expert_ffn", "shared_ffn")
    spans = {name: Span(0, len(getattr(place, name))) for name in names}
    others = tuple((counts, HeadSpans(*(Span(0, len(span)) for span in own))) for counts, own in place.other_heads)
    # Any two stages will do: only being the first or the last one matters.
    stage, stages = (1, 2) if place.last else (0, 2)
    share = msgspec.structs.replace(
        place, rank=0, tp_rank=0, dp_rank=0, stage=stage, stages=stages, layers=Span(0, 0), other_heads=others, **spans
    )
    return _work(shape, precision, kv_dtype, share, layer_kinds(shape, precision, place.layers))


LayerKind = tuple[int | None, int]  # window, and the first layer that has the same parameters, stored alike


@lru_cache(maxsize=8192)
def layer_kinds(shape: ModelShape, precision: str, layers: Span) -> tuple[tuple[LayerKind, int], ...]:
    """(kind, number of layers of that kind) for the given layers."""
    counts: Counter[LayerKind] = Counter()
    for layer in range(layers.start, layers.stop):
        counts[shape.layers[layer].window, similar_layers(shape, precision)[layer]] += 1
    return tuple(counts.items())


@lru_cache(maxsize=8192)
def _work(
    shape: ModelShape, precision: str, kv_dtype: str, share: Place, kinds: tuple[tuple[LayerKind, int], ...]
) -> RankWork:
    layers: dict[LayerWork, int] = {}
    for (window, layer), count in kinds:
        products, experts = _layer(shape, precision, share, layer)
        attention = _attention(shape.layers[layer].mixer, kv_dtype, share, window)
        one = LayerWork(count=0, sums=shape.layers[layer].sums, products=products, experts=experts, attention=attention)
        layers[one] = layers.get(one, 0) + count
    *_, head = outer_parameters(shape)
    return RankWork(
        hidden=shape.hidden,
        layers=tuple(msgspec.structs.replace(one, count=count) for one, count in layers.items()),
        head=_product(shape, precision, share, head, 0) if share.last else None,
    )


@lru_cache(maxsize=8192)
def _layer(
    shape: ModelShape, precision: str, place: Place, layer: int
) -> tuple[tuple[MatrixProduct, ...], ExpertWork | None]:
    """The matrices of one layer, and its experts."""
    products, numbers, nbytes = [], 0, 0
    for parameter in layer_parameters(shape, layer):
        if parameter.parts[0].cols is None:
            continue
        product = _product(shape, precision, place, parameter, layer)
        if parameter.role == "expert":
            numbers, nbytes = numbers + product.numbers, nbytes + product.nbytes
        else:
            products.append(product)
    ffn = shape.layers[layer].ffn
    if not isinstance(ffn, Experts):
        return tuple(products), None
    # `nbytes` counts all experts of the rank together, `numbers` one of them.
    held = max(1, len(place.experts))
    experts = ExpertWork(held=held, count=ffn.count, top_k=ffn.top_k, numbers=numbers, nbytes=nbytes / held)
    return tuple(products), experts


def _product(shape: ModelShape, precision: str, place: Place, parameter: Parameter, layer: int) -> MatrixProduct:
    rows = sum(len(part.rows.owned(place)) for part in parameter.parts)
    cols = parameter.parts[0].cols
    assert cols is not None
    numbers = rows * len(cols.owned(place))
    size = parameter_bytes(shape, precision, place, parameter, layer)
    return MatrixProduct(numbers, size, precision not in OTHERS and size >= 2 * numbers)


def _attention(mixer: Mixer, kv_dtype: str, place: Place, window: int | None) -> AttentionWork:
    heads = len(place.heads_of(mixer.head_counts).q)
    if isinstance(mixer, LatentAttention):
        # Decode works on the cached vectors themselves, with the up-projections moved to the query and the output.
        rank, rope = mixer.kv_lora_rank, mixer.rope_dim
        key, value = rank + rope, rank
        prompt = mixer.nope_dim + rope + mixer.v_dim
    else:
        key = value = mixer.head_dim
        prompt = key + value
    return AttentionWork(
        cache_bytes=mixer_spec(mixer, place, kv_dtype).bytes_per_token,
        decode_flops=2.0 * heads * (key + value),
        prefill_flops=2.0 * heads * prompt,
        window=window,
    )
