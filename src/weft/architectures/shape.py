"""The shape of a model: everything about it that is a number, and nothing about where it runs."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.architectures.published import PublishedQuantization

DType = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


THETA = 10000.0  # of a rotary embedding, where a checkpoint does not say


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base `theta`, and how its frequencies are scaled for longer contexts.

    `kind` is Transformers' `rope_type`: default, linear, dynamic, llama3 or yarn. The other fields are that
    scaling's own, None where the checkpoint does not give them; `original_max_positions` is the length that
    the model was trained at before scaling. `factors` are llama3's divisors of the head_dim/2 frequencies
    where the checkpoint gives those (GGUF does) in place of the parameters they come from.
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
        """The model's length in tokens where its file says `max_positions`: of YaRN some say the length before
        scaling, some the one after it."""
        if self.kind != "yarn" or self.original_max_positions is None:
            return max_positions
        return max(max_positions, int(self.original_max_positions * self.factor))


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: of `count`, each `ffn` wide, a token goes through `top_k` that a router chooses.

    `shared` experts, together `shared_ffn` wide, see every token. `dense_layers` have an MLP of the shape's own
    `ffn` in the experts' place.
    """

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: what is cached is one vector of `kv_lora_rank` + `rope_dim` per token and layer.

    A head's query and key are `nope_dim` + `rope_dim` long (the shape's `head_dim`), its value `v_dim`.
    `q_lora_rank` None: queries are projected at once.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only model. Lengths are in tokens; `head_dim` is independent of `hidden`.

    `windows[layer]` is that layer's sliding window in tokens (a query sees itself and the window-1 before
    it), or None for full attention. `dtype` is the checkpoint's own. `eos` holds every id that ends an
    answer (config and generation_config together), `bos` the id that starts a text, if any. With `experts`,
    `ffn` is the width of the layers that have none. `published` is how its weights are stored, where GPTQ, AWQ or
    compressed-tensors quantised them.
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
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def longest(self) -> int:
        """Tokens that the rotary embedding reaches: linear and dynamic scaling stretch the model's own length."""
        stretched = self.rope.kind in ("linear", "dynamic")
        return int(self.max_positions * self.rope.factor) if stretched else self.max_positions

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers
