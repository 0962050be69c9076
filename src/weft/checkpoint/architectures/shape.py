"""Model shapes: the dimensions and options that define a model's computation, independent of any device.

A decoder is a tuple of layers, each a value: a mixer (what tokens learn of each other), a feed-forward part and norms.
"""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import Literal, NamedTuple

import msgspec

from weft.checkpoint.architectures.library import LibraryModel
from weft.checkpoint.architectures.published import PublishedQuantization

DType = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# Functions of an MLP; "gelu_tanh" is GELU by its approximation with tanh.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

THETA = 10000.0  # base of a rotary embedding if the checkpoint gives none


class Rope(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Rotary position embedding: its base `theta`, and the scaling of its frequencies for longer contexts.

    `kind` is Transformers' `rope_type`; "qwen", Qwen v1's dynamic scaling, which Transformers does not have; or "none"
    for a model that does not rotate queries and keys. The other fields are parameters of that scaling, None if the
    checkpoint does not give them. `original_max_positions` is the length in tokens that the model was trained at before
    scaling. `factors` are llama3's divisors of the head_dim/2 frequencies, if the checkpoint gives the divisors
    themselves (as GGUF does) and not the parameters for them. longrope has two sets of divisors: `short_factors` for
    texts of up to `original_max_positions` tokens, `long_factors` for longer ones.

    `rotated` is the share of a head's numbers that is rotated, the first of them (`partial_rotary_factor`).
    """

    theta: float = THETA
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "qwen", "none"] = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated: float = 1.0

    def rotated_dims(self, head_dim: int) -> int:
        """Number of a head's numbers that are rotated."""
        return int(head_dim * self.rotated)

    def reach(self, max_positions: int) -> int:
        """Length of the model in tokens if its file says `max_positions`.

        Under YaRN some files give the length before scaling and some the length after it.
        """
        if self.kind != "yarn" or self.original_max_positions is None:
            return max_positions
        return max(max_positions, int(self.original_max_positions * self.factor))

    def magnitude(self, mscale: float) -> float:
        """YaRN's factor on numbers of heads, for its parameter `mscale`."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * log(self.factor) + 1.0

    def stretched(self, max_positions: int) -> int:
        """Largest length in tokens of a model that was trained at `max_positions`.

        Linear and dynamic scaling stretch that length, unless the checkpoint says that it is stretched already.
        """
        if self.kind not in ("linear", "dynamic", "qwen"):
            return max_positions
        return round((self.original_max_positions or max_positions) * self.factor)


class HeadCounts(NamedTuple):
    """Numbers of query heads and of KV heads of a layer, by which its attention is cut. Layers with equal numbers are
    cut alike."""

    q: int
    kv: int


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention", cache_hash=True):
    """Attention of `heads` query heads in groups that share one of `kv_heads` keys and values, `head_dim` long each.

    - `scale`: factor on the product of query and key; head_dim^-0.5 unless the model says otherwise.
    - `window`: sliding window in tokens (a query sees itself and the window - 1 tokens before it); None: all of them.
    - `qk_norm`: norm of queries and keys before the rotation: of each "head" by itself, or over "all" heads at once.
    - `bias`: the projections of queries, keys and values have one; `out_bias`: the output projection.
    - `sinks`: each query head has a learned logit that takes part in the softmax and has no value.
    - `logn`: the query of token n of a text (counted from 1) is multiplied by the logarithm of n to this base, if n is
      larger; None for a model without such a factor.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope = Rope()
    window: int | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    logn: int | None = None

    @property
    def rope_dim(self) -> int:
        """Length of the part of a head that is rotated."""
        return self.head_dim

    @property
    def latent_dim(self) -> int:
        """Length of the cached vector that all heads share: none."""
        return 0

    @property
    def head_counts(self) -> HeadCounts:
        return HeadCounts(self.heads, self.kv_heads)

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.heads // self.kv_heads


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, tag="latent", cache_hash=True):
    """Multi-head latent attention: the cache holds one vector of `kv_lora_rank` + `rope_dim` per token and layer.

    A head's query and key are `nope_dim` + `rope_dim` long, its value `v_dim`. If `q_lora_rank` is None, queries are
    projected in one step. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    - `interleaved`: dims 2i and 2i + 1 of the rotary part are rotated together, not dims i and i + `rope_dim` / 2.
    - `bias`: the projections down to `q_lora_rank` and to the cached vector have one, and the output projection.
    - `norm_eps`: epsilon of the norms of the compressed queries and of the compressed keys and values.
    """

    heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: Rope = Rope()
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = 1e-6

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_counts(self) -> HeadCounts:
        return HeadCounts(self.heads, self.heads)

    @property
    def head_dim(self) -> int:
        """Length of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Length of the cached vector of a token."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def group(self) -> int:
        return 1

    @property
    def window(self) -> None:
        return None


class Dense(msgspec.Struct, frozen=True, kw_only=True, tag="dense", cache_hash=True):
    """MLP of `width` columns. If `gated`, its up projection is multiplied by the activated gate; else it is activated
    itself. With `bias` every projection has one."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


class Experts(msgspec.Struct, frozen=True, kw_only=True, tag="experts", cache_hash=True):
    """Mixture of experts: a router sends each token through `top_k` of `count` experts, each a gated MLP of `width`
    columns.

    - `shared` experts, together `shared_width` wide, see every token. With `shared_gate`, the sigmoid of one more
      projection of the token multiplies their result.
    - `scoring`: the router's weights are a softmax over all experts, or the sigmoid of each one's score.
    - `normalised`: the weights of the chosen experts are scaled to a sum of 1. With a softmax, that is the softmax
      over the chosen ones.
    - `scaling`: factor on the weights of the chosen experts, in the end.
    - `groups`: the experts are divided into as many groups of neighbours. Only experts of the best `top_groups` can be
      chosen: of the groups with the highest weight ("max"), or the highest sum of two weights ("top2"), by
      `group_score`.
    - `correction`: a learned bias, float32, is added to the weights for the choice of groups and experts alone.
    - `gain`: SiLU is x * sigmoid(gain * x).
    - `limit`: the gate is clamped from above before its activation, the up projection from both sides; None: neither.
    - `up_offset` is added to the up projection before the activated gate multiplies it.
    - `bias`: the router and each projection of the routed experts have one.
    """

    count: int
    top_k: int
    width: int
    shared: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction: bool = False
    activation: Activation = "silu"
    gain: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    bias: bool = False


Mixer = Attention | LatentAttention
Norms = Literal["pre", "post", "both", "residual"]
FeedForward = Dense | Experts


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One decoder layer: a mixer and a feed-forward part, each added to the residual.

    `norms`: each part's input is normalised ("pre"), its output before it is added ("post"), or "both"; or the residual
    itself after each addition ("residual").
    """

    mixer: Mixer
    ffn: FeedForward
    norms: Norms = "pre"

    @property
    def window(self) -> int | None:
        """Sliding window of the layer in tokens; None if it attends to the whole context."""
        return self.mixer.window

    @property
    def has_experts(self) -> bool:
        return isinstance(self.ffn, Experts)

    @property
    def sums(self) -> int:
        """Number of sums over the ranks of a stage: one for each part that is added to the residual."""
        return 2


class Norm(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Kind of a model's norms: RMS norm or layer norm, which has a mean and a bias as well.

    `offset` is added to a norm's weight as the checkpoint stores it (1 in Gemma).
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One decoder-only model: an embedding, layers, a final norm and a head. Lengths are in tokens.

    Layers may have any mixers. All MLPs have one width, and all mixtures the same number of experts and one width, so
    that a rank's share of a model (`Place`) has one range of each.

    - `embedding_dim`: length of the rows of embedding and head, if a projection leads from there to `hidden` and
      another one back; None if they are `hidden` long.
    - `embedding_scale`: factor on the embedding's rows.
    - `final_norm`: the last layer's result is normalised before the head.
    - `tied`: the head is the embedding.
    - `dtype`: the checkpoint's own dtype.
    - `bos`: token id that starts a text, if any. `eos`: all token ids that end an answer, from config and
      generation_config together.
    - `published`: storage format of the weights, if GPTQ, AWQ or compressed-tensors quantised them.
    - `library`: the model runs through Transformers' class, and its tensors are those listed there.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    max_positions: int
    norm: Norm = Norm()
    embedding_dim: int | None = None
    embedding_scale: float = 1.0
    final_norm: bool = True
    tied: bool = False
    dtype: DType = "bfloat16"
    published: PublishedQuantization | None = None
    library: LibraryModel | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The different mixers of the layers, each once, in the order of their first use."""
        return _mixers(self)

    @property
    def head_counts(self) -> tuple[HeadCounts, ...]:
        """The different numbers of heads of the layers, likewise."""
        return tuple(dict.fromkeys(mixer.head_counts for mixer in self.mixers))

    @property
    def q_heads(self) -> int:
        """Query heads of the layers that have the fewest: no more ranks can divide a layer."""
        return min(mixer.heads for mixer in self.mixers)

    @property
    def kv_heads(self) -> int:
        """KV heads of the layers that have the fewest."""
        return min(mixer.kv_heads for mixer in self.mixers)

    @property
    def has_latents(self) -> bool:
        """True if layers have latent attention."""
        return any(isinstance(mixer, LatentAttention) for mixer in self.mixers)

    @property
    def ffn(self) -> int:
        """Width of the model's MLPs; 0 if every layer has experts."""
        return _feed_forwards(self)[0]

    @property
    def experts(self) -> Experts | None:
        """The mixture of the layers that have experts; None if no layer has them."""
        return _feed_forwards(self)[1]

    @property
    def has_windows(self) -> bool:
        return any(layer.window is not None for layer in self.distinct_layers)

    @property
    def longest(self) -> int:
        """Largest length in tokens."""
        return max(layer.mixer.rope.stretched(self.max_positions) for layer in self.distinct_layers)

    @property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """The different layers of the model, each once, in the order of their first use."""
        return _distinct_layers(self)


@lru_cache(maxsize=64)
def _feed_forwards(shape: ModelShape) -> tuple[int, Experts | None]:
    """Width of the dense layers and the mixture of the others."""
    parts = [layer.ffn for layer in shape.distinct_layers]
    width = next((part.width for part in parts if isinstance(part, Dense)), 0)
    return width, next((part for part in parts if isinstance(part, Experts)), None)


@lru_cache(maxsize=64)
def _mixers(shape: ModelShape) -> tuple[Mixer, ...]:
    return tuple(dict.fromkeys(layer.mixer for layer in shape.distinct_layers))


@lru_cache(maxsize=64)
def _distinct_layers(shape: ModelShape) -> tuple[LayerSpec, ...]:
    return tuple(dict.fromkeys(shape.layers))
