"""Model shape, sampling and precision from config.json and generation_config.json, of Transformers 4 and 5."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.architectures.defaults import DEFAULTS, Defaults
from weft.architectures.parameters import ARCHITECTURES, RUNNABLE
from weft.architectures.shape import THETA, DType, Experts, Latent, ModelShape, Rope
from weft.errors import ModelError, error_reason
from weft.formats import limits, packed, quantization_config
from weft.formats.fields import Fields

CONFIG, GENERATION = "config.json", "generation_config.json"
QUANTIZE = "quantize_config.json"  # AutoGPTQ's own file; newer checkpoints have these fields in config.json
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32"}
NORM_EPS = 1e-6
SLIDING_WINDOW = 4096  # tokens; default of architectures with windows
MAX_WINDOW_LAYERS = 28  # default number of Qwen's first layers, which have no window
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_shape(folder: Path, own: DType = "bfloat16", *, run: bool = True) -> ModelShape:
    """Read the shape from a directory's config.json; `own` is the tensors' dtype, the default of the config's.

    End tokens are those of config.json and of generation_config.json together. Raises ModelError, in one line, for
    values that are missing, wrong, impossible or unknown; with `run`, also for values that the engine does not compute.
    """
    config = load_config(folder)
    generation = folder / GENERATION
    end_tokens = load_json(generation).token_ids("eos_token_id") if generation.exists() else ()
    shape = shape_from_config(config, own, run=run)
    return msgspec.structs.replace(shape, eos=tuple(dict.fromkeys(shape.eos + end_tokens)))


def recommended_sampling(folder: Path) -> dict[str, float | int | bool]:
    """Sampling that generation_config.json recommends, by its own names; {} if there is no such file."""
    if not (folder / GENERATION).exists():
        return {}
    fields = load_json(folder / GENERATION)
    sampling: dict[str, float | int | bool] = {}
    for name in SAMPLING:
        value = fields.values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.wrong_value(name, "a number")
        sampling[name] = value
    if "do_sample" in fields:
        sampling["do_sample"] = fields.flag("do_sample")
    return sampling


def load_config(folder: Path) -> Fields:
    """Read a directory's config.json; an AutoGPTQ file beside it becomes its `quantization_config`."""
    config, gptq_file = load_json(folder / CONFIG), folder / QUANTIZE
    if quantization(config) is not None or not gptq_file.exists():
        return config
    return Fields(
        {**config.values, "quantization_config": {"quant_method": "gptq", **load_json(gptq_file).values}}, config.where
    )


def load_json(path: Path) -> Fields:
    """Read the fields of a JSON file. Raises ModelError if the file cannot be read or is damaged."""
    try:
        limits.check_file(path, limits.CONFIG_BYTES)
        text = path.read_bytes()
        fields = Fields(msgspec.json.decode(text, type=dict[str, object]), str(path))
        limits.check_unique(text, str(path))
        return fields
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error_reason(error)}", code="cannot-read-config") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is damaged: {error}; fetch it again", code="damaged-config") from error


def architecture(config: Fields) -> str:
    """Name of the model's architecture: the first known one in `architectures`; by `model_type` without that list."""
    names = config.values.get("architectures") or []
    if not isinstance(names, list):
        raise config.wrong_value("architectures", "a list of names")
    if not names:
        kind = config.text_or("model_type", None)
        names = [name for name, default in DEFAULTS.items() if default.model_type == kind] or [kind]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ModelError(
        f"{config.where}: unknown architecture {names[0]!r}; known: {', '.join(ARCHITECTURES)}",
        code="unknown-architecture",
    )


def _with_defaults(config: Fields, default: Defaults) -> Fields:
    """Fields of the language model under their usual names, with the architecture's defaults."""
    inner = config.nested(default.inner) if default.inner else None
    own = {**config.values, **(inner.values if inner else {})}
    return Fields({**default.values, **{default.keys.get(key, key): own[key] for key in own}}, config.where)


def shape_from_config(config: Fields, own: DType = "bfloat16", *, run: bool = True) -> ModelShape:
    """Build the shape that a config describes, with its architecture's defaults.

    Raises ModelError as `read_shape` does. If the engine does not run the architecture, only the base of its rotary
    embedding is read.
    """
    name = architecture(config)
    default = DEFAULTS[name]
    if run:
        _check_runnable(config, name)
    config = _with_defaults(config, default)
    hidden, q_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers, mla = config.integer("num_hidden_layers", maximum=limits.LAYERS), latent(config)
    if config.integer_or("word_embed_proj_dim", hidden) != hidden:  # of OPT
        raise config.wrong_value("word_embed_proj_dim", f"the hidden_size, {hidden}")
    head_dim = _head_dim(config, default, hidden, q_heads, mla)
    longest = config.integer_or("max_position_embeddings", None, maximum=limits.POSITIONS)
    max_positions = longest or default.max_positions
    bias = _attention_bias(config, default)
    rotary = rope(config, max_positions) if name in RUNNABLE else Rope(theta=_theta(config, Fields({}, config.where)))
    ffn = _ffn_width(config, default, hidden)
    shape = ModelShape(
        architecture=name,
        layers=layers,
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=config.integer_or("num_key_value_heads", default.kv_heads) or q_heads,
        head_dim=head_dim,
        ffn=ffn // default.ffn_parts,
        vocab=config.integer("vocab_size"),
        max_positions=rotary.reach(max_positions),
        norm_eps=config.number_or("rms_norm_eps", None) or NORM_EPS,
        rope=rotary,
        tied=config.flag("tie_word_embeddings", default.tied),
        qkv_bias=bias or default.bias == "qkv",
        out_bias=bias,
        mlp_bias=default.bias == "all" or (default.mlp_bias and config.flag("mlp_bias")),
        qk_norm=default.qk_norm,
        windows=windows(config, default, layers),
        experts=experts(config, layers, ffn),
        mla=mla,
        dtype=dtype(config) or own,
        bos=config.integer_or("bos_token_id", default.bos, minimum=0),
        eos=config.token_ids("eos_token_id", default.eos),
    )
    quantised = quantization(config)
    if quantised is None or quantization_config.unsupported_quantization(quantised) is not None:
        return shape
    return packed.with_config_types(shape, quantised)


def _head_dim(config: Fields, default: Defaults, hidden: int, q_heads: int, mla: Latent | None) -> int:
    """Length of a query head. Raises ModelError if it is not given and cannot be hidden size / heads."""
    if mla is not None:
        return mla.nope_dim + mla.rope_dim
    head_dim = config.integer_or("head_dim", default.head_dim)
    if head_dim is None and hidden % q_heads:
        raise ModelError(
            f"{config.where}: hidden_size {hidden} is no multiple of the {q_heads} num_attention_heads",
            code="uneven-hidden-size",
        )
    return head_dim or hidden // q_heads


def _attention_bias(config: Fields, default: Defaults) -> bool:
    """True if attention's output projection has a bias."""
    return default.bias == "all" or (default.bias == "config" and config.flag("attention_bias"))


def _ffn_width(config: Fields, default: Defaults, hidden: int) -> int:
    """MLP width: the config's intermediate_size, or the architecture's multiple of the hidden size."""
    width = config.integer_or("intermediate_size", None) or default.ffn_of_hidden * hidden
    return width or config.integer("intermediate_size")


def latent(config: Fields) -> Latent | None:
    """Multi-head latent attention, in DeepSeek's fields; None if the model has none."""
    if "kv_lora_rank" not in config:
        return None
    return Latent(
        kv_lora_rank=config.integer("kv_lora_rank"),
        q_lora_rank=config.integer_or("q_lora_rank", None),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        v_dim=config.integer("v_head_dim"),
    )


def experts(config: Fields, layers: int, ffn: int) -> Experts | None:
    """The mixture of experts, in the fields of Mixtral, Qwen, DeepSeek and others; None if the model has none."""
    key = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config), None)
    if key is None:
        return None
    width = config.integer_or("moe_intermediate_size", ffn) or ffn
    shared = config.integer_or("n_shared_experts", 0, minimum=0) or 0
    count, top_k = config.integer(key, maximum=limits.EXPERTS), config.integer("num_experts_per_tok")
    if top_k > count:
        raise config.wrong_value("num_experts_per_tok", f"at most the {count} experts")
    return Experts(
        count=count,
        top_k=top_k,
        ffn=width,
        shared=shared,
        shared_ffn=shared * width,
        dense_layers=_dense_layers(config, layers),
    )


def _dense_layers(config: Fields, layers: int) -> tuple[int, ...]:
    """Numbers of the layers without experts in a model with experts."""
    dense = set(range(config.integer_or("first_k_dense_replace", 0, minimum=0) or 0))
    dense |= set(config.token_ids("mlp_only_layers"))
    step = config.integer_or("decoder_sparse_step", 1) or 1
    dense |= {layer for layer in range(layers) if (layer + 1) % step}
    return tuple(sorted(layer for layer in dense if layer < layers))


def quantization(config: Fields) -> Fields | None:
    """The config's description of its quantised weights; None if they are not quantised."""
    fields = config.nested("quantization_config") or config.nested("compression_config")
    return fields if fields is not None and fields.values else None


def precision(config: Fields) -> str | None:
    """Precision of quantised weights, a name of `formats.precision`; None if the weights are not quantised.

    Raises ModelError for a method whose bytes Weft does not know.
    """
    quantised = quantization(config)
    if quantised is None:
        return None
    if quantization_config.unsupported_quantization(quantised) is None:
        return quantization_config.parse_quantization(quantised).precision
    precision = quantization_config.precision_of_unsupported(quantised)
    if precision is None:
        method = quantised.text_or("quant_method", None)
        raise ModelError(
            f"{config.where}: the weights are quantised with {method or 'an unknown method'}, whose bytes Weft does "
            "not know; name the nearest format with --precision",
            code="unknown-quantization",
        )
    return precision


def _check_runnable(config: Fields, name: str) -> None:
    """Raise ModelError for a config that the engine does not run, or would compute wrongly."""
    if name not in RUNNABLE:
        raise ModelError(
            f"{config.where}: {name} is known to `weft plan`, but the engine does not run it yet; it runs "
            f"{', '.join(RUNNABLE)}",
            code="architecture-not-run",
        )
    quantised = quantization(config)
    unsupported = None if quantised is None else quantization_config.unsupported_quantization(quantised)
    if unsupported is not None:
        raise ModelError(
            f"{config.where}: the weights are quantised with {unsupported}, which Weft does not read "
            f"({quantization_config.READ}); use one of those, the unquantised checkpoint or a GGUF file",
            code="quantization-not-read",
        )
    if config.text_or("hidden_act", "silu") not in ("silu", "swish", None):
        raise config.wrong_value("hidden_act", "silu")


def dtype(config: Fields) -> DType | None:
    """The config's `dtype` (Transformers 5) or `torch_dtype` (4); None if it leaves the dtype to the tensors."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = config.text_or(key, None)
    if name in (None, "auto"):
        return None
    known = DTYPES.get(str(name).removeprefix("torch."))
    if known is None:
        raise config.wrong_value(key, "bfloat16, float16 or float32")
    return known


def windows(config: Fields, default: Defaults, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens; () if no layer has one."""
    window = config.integer_or("sliding_window", SLIDING_WINDOW)
    if default.window == "none" or window is None:
        return ()
    if default.window == "all":
        return (window,) * layers
    if default.window == "some" and not config.flag("use_sliding_window"):
        return ()
    windows = tuple(window if slides else None for slides in _sliding_layers(config, default, layers))
    return windows if any(windows) else ()


def _sliding_layers(config: Fields, default: Defaults, layers: int) -> list[bool]:
    """True for each layer with a sliding window: by `layer_types`, or else by the architecture's pattern."""
    types = config.values.get("layer_types")
    if types is None:
        return _sliding_pattern(config, default, layers)
    if not isinstance(types, list) or any(type not in LAYER_TYPES for type in types):
        raise config.wrong_value("layer_types", "a list of full_attention and sliding_attention")
    if len(types) != layers:
        raise ModelError(
            f"{config.where}: layer_types has {len(types)} entries for {layers} num_hidden_layers",
            code="layer-types-of-other-length",
        )
    return [type == "sliding_attention" for type in types]


def _sliding_pattern(config: Fields, default: Defaults, layers: int) -> list[bool]:
    if isinstance(default.window, int):
        every = config.integer_or("window_pattern", default.window) or default.window
        return [(layer + 1) % every != 0 for layer in range(layers)]
    first = config.integer_or("max_window_layers", MAX_WINDOW_LAYERS, minimum=0) or 0
    return [layer >= first for layer in range(layers)]


def rope(config: Fields, max_positions: int) -> Rope:
    """The rotary embedding, from `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    scaling = _rope_parameters(config)
    theta = _theta(config, scaling)
    for fields in (scaling, config):
        if fields.number_or("partial_rotary_factor", 1.0) not in (1.0, None):
            raise fields.wrong_value("partial_rotary_factor", "1")
    key = "rope_type" if "rope_type" in scaling else "type"
    original = config.integer_or("original_max_position_embeddings", None) or scaling.integer_or(
        "original_max_position_embeddings", max_positions
    )
    match scaling.text_or(key, "default"):
        case None | "default":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=scaling.number("factor"))
        case "dynamic":
            return Rope(
                theta=theta, kind="dynamic", factor=scaling.number("factor"), original_max_positions=max_positions
            )
        case "llama3":
            return _llama3(scaling, theta, original)
        case "yarn":
            return _yarn(scaling, theta, original or max_positions, max_positions)
    raise scaling.wrong_value(key, "default, linear, dynamic, llama3 or yarn")


def _llama3(scaling: Fields, theta: float, original: int | None) -> Rope:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.wrong_value("high_freq_factor", f"above low_freq_factor, {low:g}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=scaling.number("factor"),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, original: int, max_positions: int) -> Rope:
    return Rope(
        theta=theta,
        kind="yarn",
        factor=scaling.number_or("factor", None) or max_positions / original,
        original_max_positions=original,
        beta_fast=scaling.number_or("beta_fast", None),
        beta_slow=scaling.number_or("beta_slow", None),
        mscale=scaling.number_or("mscale", None),
        mscale_all_dim=scaling.number_or("mscale_all_dim", None),
        attention_factor=scaling.number_or("attention_factor", None),
        truncate=scaling.flag("truncate", True),
    )


def _theta(config: Fields, scaling: Fields) -> float:
    return scaling.number_or("rope_theta", None) or config.number_or("rope_theta", None) or THETA


def _rope_parameters(config: Fields) -> Fields:
    """The rotary parameters. One set per type of layer is accepted if all sets are equal, else raises ModelError."""
    scaling = config.nested("rope_scaling")
    if scaling is None or not scaling.values:
        scaling = config.nested("rope_parameters") or Fields({}, config.where)
    inner = [value for value in scaling.values.values() if isinstance(value, dict)]
    if not inner:
        return scaling
    if any(value != inner[0] for value in inner):
        raise ModelError(
            f"{scaling.where} differs between types of layers, which Weft does not compute; use another model",
            code="rope-differs-between-layers",
        )
    return Fields(inner[0], scaling.where)
