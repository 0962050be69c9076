"""Layers of a model as its config.json describes them: attention, MLP, experts, windows."""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import EXPERT_COUNTS, Architecture, ConfigFields
from weft.checkpoint.architectures.compose import compose_layers
from weft.checkpoint.architectures.shape import Activation, Attention, Dense, Experts, LayerSpec, Rope
from weft.checkpoint.config.deepseek import read_latent_attention, read_routing
from weft.checkpoint.config.rope import read_base, read_ropes
from weft.checkpoint.files import limits
from weft.checkpoint.files.fields import Fields
from weft.errors import ModelError

SLIDING_WINDOW = 4096  # tokens; default of architectures with windows
MAX_WINDOW_LAYERS = 28  # default number of Qwen's first layers, which have no window
LAYER_TYPES = ("full_attention", "sliding_attention")
# Names of each activation in config.json.
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu": ("relu",),
}


def with_defaults(config: Fields, default: ConfigFields) -> Fields:
    """Fields of the language model under their usual names, with the architecture's defaults."""
    inner = config.nested(default.inner) if default.inner else None
    own = {**config.values, **(inner.values if inner else {})}
    return Fields({**default.values, **{default.keys.get(key, key): own[key] for key in own}}, config.where)


def read_layers(config: Fields, known: Architecture, max_positions: int) -> tuple[LayerSpec, ...]:
    """All layers of a model; `config` has its usual names and defaults. Raises ModelError for a wrong field.

    If the engine does not run the architecture, only the base of its rotary embedding is read.
    """
    default = known.config
    count = config.integer("num_hidden_layers", maximum=limits.LAYERS)
    local_rope: Rope | None = None
    if known.names.positions:
        rope = Rope(kind="none")
    elif known.runs:
        rope, local_rope = read_ropes(
            config, max_positions, default.local_rope, stretched=default.stretched, partial=default.partial_rotary
        )
    else:
        rope = Rope(theta=read_base(config))
    all_biased = default.bias == "all" and config.flag("enable_bias", True)
    bias = all_biased or (default.bias == "config" and config.flag("attention_bias"))
    mlp_bias = all_biased or (default.mlp_bias and config.flag("mlp_bias"))
    width = _mlp_width(config, default) // default.ffn_parts
    return compose_layers(
        known,
        read_latent_attention(config, rope, bias=bias) or _attention(config, known, rope, bias=bias),
        _windows(config, default, count),
        Dense(
            width=width,
            activation=read_activation(config, known) or default.activation,
            gated=known.names.gated,
            bias=mlp_bias,
        ),
        _experts(config, default, width, bias=mlp_bias),
        _dense_layers(config),
        local_rope=local_rope,
        norms=None if config.flag("do_layer_norm_before", True) else "residual",
    )


def read_activation(config: Fields, known: Architecture) -> Activation | None:
    """The config's activation; None if it is not the architecture's own or, without a gate, one of ACTIVATIONS."""
    own = known.config.activation
    name = config.text_or("hidden_act", None)
    if name is None or name in ACTIVATIONS[own]:
        return own
    return None if known.names.gated else next((key for key, names in ACTIVATIONS.items() if name in names), None)


def _attention(config: Fields, known: Architecture, rope: Rope, *, bias: bool) -> Attention:
    """Attention of all layers, without windows. `bias`: the output projection has one."""
    default, heads = known.config, config.integer("num_attention_heads")
    head_dim = _head_dim(config, default, heads)
    check_rotated(rope, head_dim, config)
    scaled_by = config.number(default.query_scale) if default.query_scale else head_dim
    return Attention(
        heads=heads,
        kv_heads=config.integer_or("num_key_value_heads", default.kv_heads) or heads,
        head_dim=head_dim,
        scale=scaled_by**-0.5,
        rope=rope,
        qk_norm=default.qk_norm,
        bias=bias or default.bias == "qkv",
        out_bias=bias,
        sinks=bool(known.names.sinks),
        logn=_logn(config, default),
    )


def check_rotated(rope: Rope, head_dim: int, fields: Fields) -> None:
    """Raise ModelError if the rotated part of a head is no whole number of pairs, or has not a divisor for each."""
    rotated = rope.rotated_dims(head_dim)
    if rotated > head_dim or (rotated % 2 and rotated < head_dim):  # a whole head is checked with the shape
        raise fields.wrong_value("partial_rotary_factor", f"an even number of a head's {head_dim} numbers")
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != rotated // 2:
            raise ModelError(
                f"{fields.where}: {name} has {len(factors)} numbers; it must have one for each of {rotated // 2} "
                "rotary frequencies",
                code="bad-rope-factors",
            )


def _logn(config: Fields, default: ConfigFields) -> int | None:
    """Base of the factor on queries beyond the length that Qwen v1 was trained at; None if the config asks for none."""
    trained = config.integer_or("max_position_embeddings", default.max_positions)
    return trained if default.logn and config.flag("use_logn_attn") else None


def _head_dim(config: Fields, default: ConfigFields, heads: int) -> int:
    """Length of a query head. Raises ModelError if it is not given and cannot be hidden size / heads."""
    head_dim, hidden = config.integer_or("head_dim", default.head_dim), config.integer("hidden_size")
    if head_dim is None and hidden % heads:
        raise ModelError(
            f"{config.where}: hidden_size {hidden} is no multiple of the {heads} num_attention_heads",
            code="uneven-hidden-size",
        )
    return head_dim or hidden // heads


def _mlp_width(config: Fields, default: ConfigFields) -> int:
    """Columns of all parts of the MLP: the config's intermediate_size, or a multiple of the hidden size."""
    width = config.integer_or("intermediate_size", None)
    return width or default.ffn_of_hidden * config.integer("hidden_size") or config.integer("intermediate_size")


def _experts(config: Fields, default: ConfigFields, mlp_width: int, *, bias: bool) -> Experts | None:
    """The mixture of experts, in the fields of Mixtral, Qwen, DeepSeek and others; None if the model has none."""
    key = next((key for key in EXPERT_COUNTS if key in config), None)
    if key is None:
        return None
    width = config.integer_or("moe_intermediate_size", mlp_width) or mlp_width
    shared, shared_width = _shared_experts(config, default, width)
    count, top_k = config.integer(key, maximum=limits.EXPERTS), config.integer("num_experts_per_tok")
    if top_k > count:
        raise config.wrong_value("num_experts_per_tok", f"at most the {count} experts")
    normalised = default.normalised == "always" or config.flag("norm_topk_prob")
    # Models without these fields take the experts of the highest weights.
    routing = read_routing(config, count, top_k, normalised=normalised) if "topk_method" in default.values else None
    return Experts(
        count=count,
        top_k=top_k,
        width=width,
        shared=shared,
        shared_width=shared_width,
        shared_gate=default.shared_gate,
        normalised=normalised,
        activation=default.activation,
        gain=config.number_or("swiglu_alpha", default.gain) or 1.0,
        limit=config.number_or("swiglu_limit", default.limit),
        up_offset=default.up_offset,
        bias=bias,
        **(routing._asdict() if routing else {}),
    )


def _shared_experts(config: Fields, default: ConfigFields, width: int) -> tuple[int, int]:
    """Number of shared experts, and their columns together; `width` is a routed expert's."""
    if default.shared_gate:
        return 1, config.integer("shared_expert_intermediate_size")
    shared = config.integer_or("n_shared_experts", 0, minimum=0) or 0
    return shared, shared * width


def _dense_layers(config: Fields) -> set[int]:
    """Numbers of the layers without experts in a model with experts."""
    layers, every = config.integer("num_hidden_layers"), config.integer_or("moe_layer_freq", 1) or 1
    dense = set(range(config.integer_or("first_k_dense_replace", 0, minimum=0) or 0))
    dense |= {layer for layer in range(layers) if layer % every}
    dense |= set(config.token_ids("mlp_only_layers"))
    step = config.integer_or("decoder_sparse_step", 1) or 1
    return dense | {layer for layer in range(layers) if (layer + 1) % step}


def _windows(config: Fields, default: ConfigFields, layers: int) -> list[int | None]:
    """Each layer's sliding window in tokens; None for a layer without one."""
    unused = default.window == "none" or (default.window == "some" and not config.flag("use_sliding_window"))
    if unused or (window := _window(config)) is None:
        return [None] * layers
    if default.window == "all":
        return [window] * layers
    return [window if slides else None for slides in _sliding_layers(config, default, layers)]


def _window(config: Fields) -> int | None:
    if config.values.get("sliding_window") == 0:
        # GGUF files say so if there is none; in config.json its meaning is unknown.
        raise config.wrong_value("sliding_window", "1 token or more, or null for a model without a window")
    return config.integer_or("sliding_window", SLIDING_WINDOW)


def _sliding_layers(config: Fields, default: ConfigFields, layers: int) -> list[bool]:
    """True for each layer with a sliding window: by `layer_types`, or else by the architecture's pattern."""
    types = config.values.get("layer_types")
    if types is None:
        return _sliding_pattern(config, default, layers)
    if not isinstance(types, list) or not all(isinstance(type, str) for type in types):
        raise config.wrong_value("layer_types", f"a list of {' and '.join(LAYER_TYPES)}")
    if unknown := set(types).difference(LAYER_TYPES):
        names = " ".join(", ".join(sorted(unknown)).split())
        raise ModelError(
            f"{config.where}: layer_types has {names:.80}, which Weft does not compute; it runs "
            f"models whose layers are all {' or '.join(LAYER_TYPES)}",
            code="layer-type-not-run",
        )
    if len(types) != layers:
        raise ModelError(
            f"{config.where}: layer_types has {len(types)} entries for {layers} num_hidden_layers",
            code="layer-types-of-other-length",
        )
    return [type == "sliding_attention" for type in types]


def _sliding_pattern(config: Fields, default: ConfigFields, layers: int) -> list[bool]:
    if isinstance(default.window, int):
        every = config.integer_or("window_pattern", default.window) or default.window
        return [(layer + 1) % every != 0 for layer in range(layers)]
    first = config.integer_or("max_window_layers", MAX_WINDOW_LAYERS, minimum=0) or 0
    return [layer >= first for layer in range(layers)]
