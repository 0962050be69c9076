"""Model shapes: the dimensions and options that define a model's computation, independent of any device."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.architectures.published import PublishedQuantization

DType = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

THETA = 10000.0  # base of a rotary embedding if the checkpoint gives none


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: its base `theta`, and the scaling of its frequencies for longer contexts.

    `kind` is Transformers' `rope_type`. The other fields are parameters of that scaling, None if the checkpoint does
    not give them. `original_max_positions` is the length in tokens that the model was trained at before scaling.
    `factors` are llama3's divisors of the head_dim/2 frequencies, if the checkpoint gives the divisors themselves (GGUF
    does) and not the parameters that they are computed from.
    """

    theta: float = THETA
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
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

    def reach(self, max_positions: int) -> int:
        """Length of the model in tokens if its file says `max_positions`.

        Under YaRN some files give the length before scaling and some the length after it.
        """
        if self.kind != "yarn" or self.original_max_positions is None:
            return max_positions
        return max(max_positions, int(self.original_max_positions * self.factor))


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts: a router sends each token through `top_k` of `count` experts, each `ffn` wide.

    `shared` experts, together `shared_ffn` wide, see every token. The layers in `dense_layers` have an MLP, as wide as
    the shape's own `ffn`, and no experts.
    """

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: the cache holds one vector of `kv_lora_rank` + `rope_dim` per token and layer.

    A head's query and key are `nope_dim` + `rope_dim` long (the shape's `head_dim`), its value `v_dim`. If
    `q_lora_rank` is None, queries are projected in one step.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only model. Lengths are in tokens; `head_dim` is independent of `hidden`.

    - `windows[layer]`: the layer's sliding window in tokens (a query sees itself and the window-1 tokens before it);
      None for full attention.
    - `dtype`: the checkpoint's own dtype.
    - `bos`: token id that starts a text, if any. `eos`: all token ids that end an answer, from config and
      generation_config together.
    - `ffn`: MLP width; in a model with `experts`, that of the layers without experts.
    - `published`: storage format of the weights, if GPTQ, AWQ or compressed-tensors quantised them.
    """

    architecture: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    experts: Experts | None = None
    mla: Latent | None = None
    dtype: DType = "bfloat16"
    published: PublishedQuantization | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def longest(self) -> int:
        """Largest length in tokens: linear and dynamic rotary scaling stretch the model's own length."""
        stretched = self.rope.kind in ("linear", "dynamic")
        return int(self.max_positions * self.rope.factor) if stretched else self.max_positions

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers
