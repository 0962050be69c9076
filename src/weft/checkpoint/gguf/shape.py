"""Model shape and recommended sampling from a GGUF file's metadata and tensors."""

from __future__ import annotations

from math import isclose

from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Architecture
from weft.checkpoint.architectures.compose import compose_layers
from weft.checkpoint.architectures.registry import ARCHITECTURES, find_architecture
from weft.checkpoint.architectures.shape import Attention, Dense, DType, Experts, LayerSpec, ModelShape, Norm, Rope
from weft.checkpoint.config.config_json import SAMPLING
from weft.checkpoint.config.rope import with_original
from weft.checkpoint.files import limits
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.gguf import Array, Gguf
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.gguf.deepseek import latent_attention, read_routing
from weft.checkpoint.gguf.rope import planned_rope, rope
from weft.errors import ModelError

# Hugging Face's name by general.architecture. `llama` is Llama, Mistral, SmolLM2 and all that compute like them.
BY_GGUF_NAME = {entry.gguf: name for name, entry in ARCHITECTURES.items() if entry.gguf}
RUNNABLE = tuple(name for name in BY_GGUF_NAME if ARCHITECTURES[BY_GGUF_NAME[name]].runs)
# Keys of tokenizer.ggml: each of these tokens ends an answer in llama.cpp.
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
CORRECTION = "exp_probs_b.bias"  # name of the correction of the router; DeepSeek has one since version 3
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Keys that change what llama.cpp computes. None is written for the models above.
REFUSED = (
    "expert_count",
    "attention.key_length_mla",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.sliding_window_pattern",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "final_logit_softcapping",
    "rope.scaling.yarn_log_multiplier",
)
# Keys of REFUSED that mixtures of experts compute, and the keys of latent attention.
ALLOWED_WITH_EXPERTS = ("expert_count",)
ALLOWED_WITH_LATENTS = ("attention.key_length_mla", "rope.scaling.yarn_log_multiplier")
# Values, of keys about the shares of a token's experts, that stand for what is computed: 0 for an architecture's own, 1
# for a softmax (or no scale). 3 is a softmax over the chosen experts alone, the same as a normalised one.
GATING, SCALES = (0, 1, 3), (0, 1)
# Values of general.architecture that llama.cpp knows to leave the weights of a token's experts as they are, which the
# files do not say.
NOT_NORMALISED = ("qwen2moe",)
FLOAT32_ERROR = 1e-5  # of a number that the file has in 32 bits, from the same number here
LAYERS_OF_GEMMA3_27B = 62
GEMMA3_LOCAL_BASE = 1e4  # base of the rotary embedding in layers with a window, which older files do not give
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


def architecture(gguf: Gguf, *, run: bool = True) -> str:
    """Hugging Face's name of the file's architecture.

    Raises ModelError for an unknown architecture; with `run`, also for an architecture that only the planner knows.
    """
    name = Fields(gguf.metadata, gguf.path).text_or("general.architecture", None)
    if name not in BY_GGUF_NAME:
        raise ModelError(
            f"{gguf.path} has the unknown architecture {name!r:.80}; known in GGUF files: {', '.join(RUNNABLE)}",
            code="unknown-architecture",
        )
    if name not in RUNNABLE and run:
        raise ModelError(
            f"{gguf.path}: {name} is known to `weft plan`, but the engine does not run it yet; it runs "
            f"{', '.join(RUNNABLE)}",
            code="architecture-not-run",
        )
    if name == "llama" and gguf.metadata.get("llama.expert_count"):
        return "MixtralForCausalLM"
    if name == "deepseek2" and any(tensor.endswith(CORRECTION) for tensor in gguf.tensors):
        return "DeepseekV3ForCausalLM"
    return BY_GGUF_NAME[name]


def shape_from_gguf(gguf: Gguf, *, run: bool = True) -> ModelShape:
    """Read the model's shape from a GGUF header.

    Raises ModelError, in one line, for values that are missing, impossible or unknown; with `run`, also for values that
    the engine does not compute. Without `run` only the base of the rotary embedding is read.
    """
    known, where, tensors = find_architecture(architecture(gguf, run=run)), gguf.path, gguf.tensors
    prefix = f"{gguf.metadata['general.architecture']}."
    fields = own_fields(gguf, prefix)
    _check_fields(fields, where, prefix, known, run=run)
    if EMBEDDING not in tensors or len(tensors[EMBEDDING].dims) != 2:
        raise ModelError(
            f"{where} has no {EMBEDDING} of two dims; it holds no whole model", code="gguf-without-embedding"
        )
    layers = _layers(gguf, fields, known, run=run)
    hidden, tokens = fields.integer("embedding_length"), token_fields(gguf)
    context = fields.integer("context_length", maximum=limits.POSITIONS)
    return ModelShape(
        architecture=known.name,
        layers=layers,
        hidden=hidden,
        vocab=tensors[EMBEDDING].dims[0],
        max_positions=layers[0].mixer.rope.reach(context),
        # The converter has added a norm's offset to its weight.
        norm=Norm(kind=known.config.norm, eps=_norm_eps(fields)),
        embedding_scale=_embedding_scale(fields, known),
        tied=HEAD not in tensors,
        dtype=dtype(tensors[EMBEDDING]),
        bos=tokens.integer_or("tokenizer.ggml.bos_token_id", None, minimum=0),
        eos=_end_tokens(tokens),
    )


def _layers(gguf: Gguf, fields: Fields, known: Architecture, *, run: bool) -> tuple[LayerSpec, ...]:
    """All layers of the model."""
    default, tensors = known.config, gguf.tensors
    mixer = latent_attention(fields, run=run) or _attention(gguf, fields, known, run=run)
    count = fields.integer("block_count", maximum=limits.LAYERS)
    width = fields.integer("feed_forward_length") // default.ffn_parts
    bias = "blk.0.ffn_down.bias" in tensors or "blk.0.ffn_down_exps.bias" in tensors
    return compose_layers(
        known,
        mixer,
        windows(fields, known, count),
        Dense(width=width, activation=default.activation, gated=known.names.gated, bias=bias),
        experts(fields, known, width, bias=bias),
        range(fields.integer_or("leading_dense_block_count", 0, minimum=0) or 0),
        local_rope=local_rope(fields, known) if run else None,
    )


def _attention(gguf: Gguf, fields: Fields, known: Architecture, *, run: bool) -> Attention:
    """Attention of all layers, without windows."""
    tensors, heads, head_dim = gguf.tensors, fields.integer("attention.head_count"), _head_dim(fields)
    rotary = planned_rope(fields)
    if run:
        rotary = rope(gguf, fields, head_dim, _rotated(fields, known, head_dim))
        # llama.cpp knows where YaRN's ramp begins and ends; the files do not say so.
        default = known.config.values.get("rope_parameters")
        if isinstance(default, dict):
            rotary = replace(rotary, truncate=default.get("truncate", rotary.truncate))
    if known.names.positions:
        rotary = Rope(kind="none")
    if known.config.stretched:
        rotary = with_original(rotary, fields.integer("context_length"))
    return Attention(
        heads=heads,
        kv_heads=fields.integer_or("attention.head_count_kv", heads) or heads,
        head_dim=head_dim,
        scale=_query_length(fields, known, head_dim) ** -0.5,
        rope=rotary,
        qk_norm=known.config.qk_norm if "blk.0.attn_q_norm.weight" in tensors else "none",
        bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        sinks=bool(known.names.sinks),
    )


def _query_length(fields: Fields, known: Architecture, head_dim: int) -> float:
    """The s of attention's scale s^-0.5. The files do not give it: llama.cpp knows Gemma's largest models by depth."""
    if not known.config.query_scale or fields.integer("block_count") != LAYERS_OF_GEMMA3_27B:
        return head_dim
    return fields.integer("embedding_length") / fields.integer("attention.head_count")


def _end_tokens(tokens: Fields) -> tuple[int, ...]:
    """All token ids that end an answer."""
    ids = [token for key in END_TOKENS for token in tokens.token_ids(f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(ids))


def _check_fields(fields: Fields, where: str, prefix: str, known: Architecture, *, run: bool) -> None:
    """With `run`, raise ModelError for a field of REFUSED whose value is not what is computed anyway."""
    allowed = ALLOWED_WITH_EXPERTS * known.config.has_experts + ALLOWED_WITH_LATENTS * known.names.latent
    for key in REFUSED if run else ():
        if fields.values.get(key) and key not in allowed and not _is_computed(fields, known, key):
            raise ModelError(
                f"{where} has {prefix}{key}, which Weft's models do not compute; use another model",
                code="gguf-feature-not-computed",
            )
    if run and known.config.has_experts and not known.names.latent:
        _check_gating(fields, known)


def _is_computed(fields: Fields, known: Architecture, key: str) -> bool:
    """Return True for a field of REFUSED whose value says what is computed without it."""
    value = fields.values[key]
    if not isinstance(value, int | float):
        return False
    if key in ("residual_scale", "logit_scale"):
        return value == 1
    if key == "embedding_scale":
        return isclose(value, _embedding_scale(fields, known), rel_tol=FLOAT32_ERROR)
    if key == "attention.scale" and not known.names.latent:
        return isclose(value, _query_length(fields, known, _head_dim(fields)) ** -0.5, rel_tol=FLOAT32_ERROR)
    return False


def _embedding_scale(fields: Fields, known: Architecture) -> float:
    return float(fields.integer("embedding_length") ** 0.5) if known.config.scaled_embedding else 1.0


def _head_dim(fields: Fields) -> int:
    default = fields.integer("embedding_length") // fields.integer("attention.head_count")
    return fields.integer_or("attention.key_length", default) or 0


def _check_gating(fields: Fields, known: Architecture) -> None:
    """Raise ModelError if the engine computes other shares of a token's experts than the file asks for."""
    normalised = known.gguf not in NOT_NORMALISED
    computed = {
        "expert_gating_func": GATING if normalised else GATING[:2],
        "expert_weights_scale": SCALES,
        "expert_weights_norm": (normalised,),
    }
    for key, values in computed.items():
        if fields.values.get(key, values[0]) not in values:
            raise fields.wrong_value(key, f"{' or '.join(map(str, values))}, which is what Weft computes")


def _norm_eps(fields: Fields) -> float:
    layer_norm = fields.number_or("attention.layer_norm_epsilon", None)
    return layer_norm or fields.number("attention.layer_norm_rms_epsilon")


def _rotated(fields: Fields, known: Architecture, head_dim: int) -> int:
    """Number of a head's numbers that are rotated. Raises ModelError if values are not as long as keys."""
    whole = f"the head's own length, {head_dim}"
    if fields.integer_or("attention.value_length", head_dim) != head_dim:
        raise fields.wrong_value("attention.value_length", whole)
    rotated = fields.integer_or("rope.dimension_count", head_dim) or head_dim
    if rotated != head_dim and not known.config.partial_rotary:
        raise fields.wrong_value("rope.dimension_count", whole)
    if rotated > head_dim or rotated % 2:
        raise fields.wrong_value("rope.dimension_count", f"an even number, at most {head_dim}")
    return rotated


def experts(fields: Fields, known: Architecture, mlp_width: int, *, bias: bool) -> Experts | None:
    """The mixture of experts, if the file has one; `mlp_width` is the default width of an expert."""
    if not fields.integer_or("expert_count", 0, minimum=0):
        return None
    count, top_k = fields.integer("expert_count", maximum=limits.EXPERTS), fields.integer("expert_used_count")
    if top_k > count:
        raise fields.wrong_value("expert_used_count", f"at most the {count} experts")
    width = fields.integer_or("expert_feed_forward_length", mlp_width) or mlp_width
    default, shared = known.config, fields.integer_or("expert_shared_count", 0, minimum=0) or 0
    shared_width = shared * width
    if default.shared_gate:
        shared, shared_width = 1, fields.integer("expert_shared_feed_forward_length")
    corrected = default.values.get("topk_method") == "noaux_tc"
    routing = read_routing(fields, count, top_k, corrected=corrected) if known.names.latent else {}
    return Experts(
        count=count,
        top_k=top_k,
        width=width,
        shared=shared,
        shared_width=shared_width,
        shared_gate=default.shared_gate,
        activation=default.activation,
        gain=default.gain,
        limit=default.limit,
        up_offset=default.up_offset,
        bias=bias,
        **{"normalised": known.gguf not in NOT_NORMALISED, **routing},
    )


def windows(fields: Fields, known: Architecture, layers: int) -> list[int | None]:
    """Each layer's sliding window in tokens; None for a layer without one."""
    window, kind = fields.integer_or("attention.sliding_window", None, minimum=0), known.config.window
    if not window:
        return [None] * layers
    every = kind if isinstance(kind, int) else layers + 1
    return [window if (layer + 1) % every else None for layer in range(layers)]


def local_rope(fields: Fields, known: Architecture) -> Rope | None:
    """The rotary embedding of layers with a window, if it differs from the other layers' embedding."""
    if not known.config.local_rope:
        return None
    return Rope(theta=fields.number_or("rope.freq_base_swa", None) or GEMMA3_LOCAL_BASE)


def dtype(embedding: TensorInfo) -> DType:
    """Dtype to compute in by default: the embedding's own, or bfloat16 if the embedding is quantised."""
    dense: dict[str, DType] = {"F32": "float32", "F16": "float16"}
    return dense.get(embedding.type, "bfloat16")


def recommended_sampling(gguf: Gguf) -> dict[str, float | int | bool]:
    """Sampling that the file recommends, by generation_config.json's names."""
    values = {name: gguf.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    return {name: value for name, value in values.items() if isinstance(value, float | int)}


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
