"""Architecture: all that sets one published architecture apart, as data. `weft.checkpoint.architectures.families`
has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from weft.checkpoint.architectures.shape import Activation, Norms

# Fields of config.json with the number of experts, of which an architecture has one or none.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Stack(msgspec.Struct, frozen=True, cache_hash=True):
    """A tensor of a checkpoint with some parameters of all experts of a layer: [experts, outputs, inputs], or
    [experts, outputs] for biases.

    - `name`: its name, relative to the layer.
    - `parameters`: an expert's parameters in it, such as "up_proj.weight"; their outputs take turns.
    - `transposed`: it is stored as [experts, inputs, outputs], unless it is quantised.
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False


class Names(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Module names of one architecture in Hugging Face checkpoints; "" for a module that it does not have.

    A fused tensor (`qkv`, `gate_up`) is named once per part that it holds, in the order of the parts. Names of a
    layer's modules are relative to `layer`, names of an expert's modules to `expert`.

    - `project_in`, `project_out`: the projections from the embedding's rows to the hidden size and back, in models
      whose rows have another length.
    - `transposed`: matrices are stored as [inputs, outputs].
    - `stacks`: tensors that hold the parameters of all experts, which are named here as if each had its own.
    - `latent`: attention has DeepSeek's modules of latent attention in place of `qkv`.
    - `shared_gate`: the projection that weighs the result of the shared experts.
    - `gguf_mlp_norm`: llama.cpp's name of `mlp_norm`.
    """

    embed: str = "model.embed_tokens"
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    sinks: str = ""
    latent: bool = False
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    transposed: bool = False
    router: str = "mlp.gate"
    correction: str = ""  # see Experts.correction
    expert: str = "mlp.experts.{expert}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacks: tuple[Stack, ...] = ()
    shared: str = "mlp.shared_experts."
    shared_gate: str = ""
    gguf_mlp_norm: str = "ffn_norm"

    @property
    def gated(self) -> bool:
        """True if the MLP multiplies its up projection by an activated gate."""
        return len(self.gate_up) == 2


class ConfigFields(msgspec.Struct, frozen=True, kw_only=True):
    """An architecture's config.json: names of its fields, and what the computation is where no field says it.

    Defaults are Transformers', of its configuration classes.

    - `other_types`: further values of `model_type`, of models that compute the same.
    - `bias`: which projections have a bias. "config": q, k, v and o, if `attention_bias` is set; "qkv":
      always those three; "all": all four, and the MLP; "none": no projection.
    - `mlp_bias`: the config's own `mlp_bias` counts.
    - `window`: which layers have a sliding window. "none"; "all"; "some": the layers that `use_sliding_window` and
      `layer_types` name; a number n: all but every nth layer, unless `layer_types` is given. Only `layer_types` can say
      that every nth layer has a window.
    - `local_rope`: the field that gives layers with a window a rotary base of their own; "" if all layers share one.
    - `stretched`: `max_position_embeddings` is the length after rotary scaling, not the one before.
    - `partial_rotary`: `partial_rotary_factor` counts; other architectures must rotate whole heads.
    - `query_scale`: the field s if attention's scale is s^-0.5 instead of head_dim^-0.5.
    - `norm_eps_field`: the field with the epsilon of all norms; "" if it is always `norm_eps`, the default.
    - `normalised`: the weights of a token's chosen experts are scaled to a sum of 1: "always", or if the config's
      `norm_topk_prob` says so.
    - `gain`, `limit`, `up_offset`: of the experts, see `Experts`; a config's `swiglu_alpha` and `swiglu_limit` count.
    - `shared_gate`: the shared experts have one, and their width together is `shared_expert_intermediate_size`.
    - `keys`: this architecture's name of a field -> the usual name.
    - `values`: the usual name of a field -> its value if the field is missing. One of EXPERT_COUNTS makes it a mixture
      of experts.
    - `logn`: queries get `Attention.logn`, if the config's `use_logn_attn` says so.
    - `ffn_of_hidden`: MLP width as a multiple of the hidden size, if the width is not given.
    - `ffn_parts`: number of MLP widths that `intermediate_size` counts together.
    - `inner`: field that holds the language model of a vision-language model.
    """

    model_type: str
    other_types: tuple[str, ...] = ()
    max_positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size over query heads
    bos: int | None = None
    eos: tuple[int, ...] = ()
    bias: Literal["config", "qkv", "all", "none"] = "config"
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    tied: bool = False
    window: Literal["none", "all", "some"] | int = "none"
    local_rope: str = ""
    stretched: bool = False
    partial_rotary: bool = False
    query_scale: str = ""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps_field: str = "rms_norm_eps"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: Activation = "silu"
    scaled_embedding: bool = False  # the embedding's rows are multiplied by the square root of the hidden size
    normalised: Literal["always", "config"] = "always"
    gain: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    shared_gate: bool = False
    keys: Mapping[str, str] = {}
    values: Mapping[str, object] = {}
    logn: bool = False
    ffn_of_hidden: int = 0
    ffn_parts: int = 1
    inner: str = ""

    def __post_init__(self) -> None:
        check_words(self)

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return any(count in self.values for count in EXPERT_COUNTS)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture: its class name in config.json, its config's fields and its tensors' names.

    - `norms`: which parts of a layer are normalised, see `LayerSpec`.
    - `runs`: the engine runs it; the planner knows all of them.
    - `gguf`: `general.architecture` in GGUF files; "" if another architecture with that name stands for both.
    - `gguf_interleaved`: llama.cpp reorders the rows of queries and keys, so that rotary pairs lie side by side.
    - `modules`: substitutions (pattern, replacement) from tensor names to Transformers' module names.
    - `renamed`: substitutions (pattern, replacement) that turn tensor names of some files into those in `names`.
    - `published`: the precisions besides 16 bits in which the model is published; () for most models' precisions.
    - `fp8_in_blocks`: it is published with FP8 in blocks of 128 x 128, and is rounded to such groups too.
    - `attention_kept`: precisions whose published checkpoints leave the matrices of attention in 16 bits.
    - `positions_before`: rows before position 0's row in a table of position embeddings.
    """

    name: str
    config: ConfigFields
    names: Names = Names()
    norms: Norms = "pre"
    runs: bool = False
    gguf: str = ""
    gguf_interleaved: bool = False
    modules: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    published: tuple[str, ...] = ()
    fp8_in_blocks: bool = False
    attention_kept: tuple[str, ...] = ()
    positions_before: int = 0

    def __post_init__(self) -> None:
        check_words(self)


def check_words(struct: msgspec.Struct) -> None:
    """Raise ValueError for a string that is none of those which its field's `Literal` has.

    msgspec checks what it decodes, not what Python builds.
    """
    for field, words in _known_words(type(struct)).items():
        value = getattr(struct, field)
        if isinstance(value, str) and value not in words:
            raise ValueError(
                f"{type(struct).__name__}({field}={value!r}): no block knows it; known: {', '.join(words)}"
            )


@lru_cache
def _known_words(kind: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """By field, the strings of its `Literal`."""
    words = {field: _words_of(hint) for field, hint in get_type_hints(kind).items()}
    return {field: known for field, known in words.items() if known}


def _words_of(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _words_of(part))
