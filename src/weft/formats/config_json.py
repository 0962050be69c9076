"""config.json and generation_config.json, as Transformers 4 and 5 write them."""

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
QUANTIZE = "quantize_config.json"  # AutoGPTQ's own, from before it was written into config.json
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32"}
NORM_EPS = 1e-6
SLIDING_WINDOW = 4096  # tokens, where an architecture with windows does not say
MAX_WINDOW_LAYERS = 28  # the first layers of Qwen, which have none


def read(folder: Path, own: DType = "bfloat16", *, run: bool = True) -> ModelShape:
    """The shape in a directory's config.json; `own` is the dtype of its tensors, taken where the config has none.

    Its end tokens are those of config.json and of generation_config.json together. Raises ModelError, in one
    line, for what is missing, wrong, impossible or unknown, and with `run` for what the engine does not compute.
    """
    config = of(folder)
    generation = folder / GENERATION
    more = load(generation).ids("eos_token_id") if generation.exists() else ()
    model = shape(config, own, run=run)
    return msgspec.structs.replace(model, eos=tuple(dict.fromkeys(model.eos + more)))


def sampling(folder: Path) -> dict[str, float | int | bool]:
    """What generation_config.json recommends, in its own words; {} where there is none."""
    if not (folder / GENERATION).exists():
        return {}
    fields = load(folder / GENERATION)
    found: dict[str, float | int | bool] = {}
    for name in SAMPLING:
        value = fields.values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.wrong(name, "a number")
        found[name] = value
    if "do_sample" in fields:
        found["do_sample"] = fields.flag("do_sample")
    return found


def of(folder: Path) -> Fields:
    """A directory's config.json, with what lies beside it of how the weights are quantised."""
    config, own = load(folder / CONFIG), folder / QUANTIZE
    if quantization(config) is not None or not own.exists():
        return config
    return Fields({**config.values, "quantization_config": {"quant_method": "gptq", **load(own).values}}, config.where)


def load(path: Path) -> Fields:
    """The fields of a JSON file. Raises ModelError where it cannot be read."""
    try:
        limits.check_file(path, limits.CONFIG_BYTES)
        text = path.read_bytes()
        fields = Fields(msgspec.json.decode(text, type=dict[str, object]), str(path))
        limits.check_unique(text, str(path))
        return fields
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error_reason(error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is damaged: {error}; fetch it again") from error


def architecture(config: Fields) -> str:
    """The first known name in `architectures`; by `model_type` where there is no such list."""
    names = config.values.get("architectures") or []
    if not isinstance(names, list):
        raise config.wrong("architectures", "a list of names")
    if not names:
        kind = config.text_or("model_type", None)
        names = [name for name, default in DEFAULTS.items() if default.model_type == kind] or [kind]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ModelError(f"{config.where}: unknown architecture {names[0]!r}; known: {', '.join(ARCHITECTURES)}")


def usual(config: Fields, default: Defaults) -> Fields:
    """The fields of the language model under their usual names, the architecture's defaults filled in."""
    inner = config.nested(default.inner) if default.inner else None
    own = {**config.values, **(inner.values if inner else {})}
    return Fields({**default.values, **{default.keys.get(key, key): own[key] for key in own}}, config.where)


def shape(config: Fields, own: DType = "bfloat16", *, run: bool = True) -> ModelShape:
    """The shape that a config gives, its architecture's defaults filled in; with `run` one that the engine runs.

    Where it is only to be planned for, the rotary embedding of an architecture that the engine does not run is
    not read beyond its base.
    """
    name = architecture(config)
    default = DEFAULTS[name]
    if run:
        _refuse(config, name)
    config = usual(config, default)
    hidden, q_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers, mla = config.integer("num_hidden_layers", maximum=limits.LAYERS), latent(config)
    if config.integer_or("word_embed_proj_dim", hidden) != hidden:  # of OPT
        raise config.wrong("word_embed_proj_dim", f"the hidden_size, {hidden}")
    head_dim = mla.nope_dim + mla.rope_dim if mla else config.integer_or("head_dim", default.head_dim)
    if head_dim is None and hidden % q_heads:
        raise ModelError(f"{config.where}: hidden_size {hidden} is no multiple of the {q_heads} num_attention_heads")
    longest = config.integer_or("max_position_embeddings", None, maximum=limits.POSITIONS)
    max_positions = longest or default.max_positions
    bias = default.bias == "all" or (default.bias == "config" and config.flag("attention_bias"))
    rotary = rope(config, max_positions) if name in RUNNABLE else Rope(theta=_theta(config, Fields({}, config.where)))
    ffn = config.integer_or("intermediate_size", None) or default.ffn_of_hidden * hidden
    if not ffn:
        ffn = config.integer("intermediate_size")
    model = ModelShape(
        architecture=name,
        layers=layers,
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=config.integer_or("num_key_value_heads", default.kv_heads) or q_heads,
        head_dim=head_dim or hidden // q_heads,
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
        eos=config.ids("eos_token_id", default.eos),
    )
    quantised = quantization(config)
    readable = quantised is not None and quantization_config.obstacle(quantised) is None
    return packed.configured(model, quantised) if quantised is not None and readable else model


def latent(config: Fields) -> Latent | None:
    """Multi-head latent attention, as DeepSeek writes it."""
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
    """The mixture of experts under the names that Mixtral, Qwen, DeepSeek and their like use."""
    key = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config), None)
    if key is None:
        return None
    width = config.integer_or("moe_intermediate_size", ffn) or ffn
    shared = config.integer_or("n_shared_experts", 0, minimum=0) or 0
    dense = set(range(config.integer_or("first_k_dense_replace", 0, minimum=0) or 0))
    dense |= set(config.ids("mlp_only_layers"))
    step = config.integer_or("decoder_sparse_step", 1) or 1
    dense |= {layer for layer in range(layers) if (layer + 1) % step}
    count, top_k = config.integer(key, maximum=limits.EXPERTS), config.integer("num_experts_per_tok")
    if top_k > count:
        raise config.wrong("num_experts_per_tok", f"at most the {count} experts")
    return Experts(
        count=count,
        top_k=top_k,
        ffn=width,
        shared=shared,
        shared_ffn=shared * width,
        dense_layers=tuple(sorted(layer for layer in dense if layer < layers)),
    )


def quantization(config: Fields) -> Fields | None:
    """How the weights are quantised; None where they are not."""
    found = config.nested("quantization_config") or config.nested("compression_config")
    return found if found is not None and found.values else None


def precision(config: Fields) -> str | None:
    """What `quantization_config` says of the weights, in the words of `formats.precision`; None where they are not
    quantised. Raises ModelError for a method that Weft does not know the bytes of."""
    quantised = quantization(config)
    if quantised is None:
        return None
    if quantization_config.obstacle(quantised) is None:
        return quantization_config.read(quantised).precision
    method = quantised.text_or("quant_method", None)
    inner = quantised.nested("config_groups")
    groups = [value for value in inner.values.values() if isinstance(value, dict)] if inner else []
    weights = groups[0].get("weights") if groups else None
    fields = Fields(weights, f"{config.where}: weights") if isinstance(weights, dict) else quantised
    algorithm = (quantised.text_or("quant_algo", None) or quantised.text_or("format", None) or "").lower()
    bits = fields.integer_or("bits", None) or fields.integer_or("num_bits", None)
    if method == "mxfp4":
        return method
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if "fp4" in algorithm:
        return "mxfp4" if algorithm.startswith("mx") else "nvfp4"
    if "fp8" in algorithm or algorithm == "float-quantized":
        return "fp8"
    if bits in (4, 8) and fields.text_or("type", "int") == "int":
        return f"int{bits}"
    raise ModelError(
        f"{config.where}: the weights are quantised with {method or 'an unknown method'}, whose bytes Weft does not "
        "know; name the nearest format with --precision"
    )


def _refuse(config: Fields, name: str) -> None:
    """What the engine does not run, or would compute wrongly if it were ignored."""
    if name not in RUNNABLE:
        raise ModelError(
            f"{config.where}: {name} is known to `weft plan`, but the engine does not run it yet; it runs "
            f"{', '.join(RUNNABLE)}"
        )
    quantised = quantization(config)
    if quantised is not None and (what := quantization_config.obstacle(quantised)):
        raise ModelError(
            f"{config.where}: the weights are quantised with {what}, which Weft does not read "
            f"({quantization_config.READ}); use one of those, the unquantised checkpoint or a GGUF file"
        )
    if config.text_or("hidden_act", "silu") not in ("silu", "swish", None):
        raise config.wrong("hidden_act", "silu")


def dtype(config: Fields) -> DType | None:
    """`dtype` (Transformers 5) or `torch_dtype` (4); None where the config leaves it to the tensors."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = config.text_or(key, None)
    if name in (None, "auto"):
        return None
    known = DTYPES.get(str(name).removeprefix("torch."))
    if known is None:
        raise config.wrong(key, "bfloat16, float16 or float32")
    return known


def windows(config: Fields, default: Defaults, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens; () where no layer has one."""
    window = config.integer_or("sliding_window", SLIDING_WINDOW)
    if default.window == "none" or window is None:
        return ()
    if default.window == "all":
        return (window,) * layers
    if default.window == "some" and not config.flag("use_sliding_window"):
        return ()
    types = config.values.get("layer_types")
    if types is None and isinstance(default.window, int):
        every = config.integer_or("window_pattern", default.window) or default.window
        types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if types is None:
        first = config.integer_or("max_window_layers", MAX_WINDOW_LAYERS, minimum=0) or 0
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if not isinstance(types, list) or any(kind not in ("full_attention", "sliding_attention") for kind in types):
        raise config.wrong("layer_types", "a list of full_attention and sliding_attention")
    if len(types) != layers:
        raise ModelError(f"{config.where}: layer_types has {len(types)} entries for {layers} num_hidden_layers")
    found = tuple(window if kind == "sliding_attention" else None for kind in types)
    return found if any(found) else ()


def rope(config: Fields, max_positions: int) -> Rope:
    """`rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling` (4, with `type` or `rope_type`)."""
    scaling = _rope_parameters(config)
    theta = _theta(config, scaling)
    for fields in (scaling, config):
        if fields.number_or("partial_rotary_factor", 1.0) not in (1.0, None):
            raise fields.wrong("partial_rotary_factor", "1")
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
            low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
            if high <= low:
                raise scaling.wrong("high_freq_factor", f"above low_freq_factor, {low:g}")
            return Rope(
                theta=theta,
                kind="llama3",
                factor=scaling.number("factor"),
                original_max_positions=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            original = original or max_positions
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
    raise scaling.wrong(key, "default, linear, dynamic, llama3 or yarn")


def _theta(config: Fields, scaling: Fields) -> float:
    return scaling.number_or("rope_theta", None) or config.number_or("rope_theta", None) or THETA


def _rope_parameters(config: Fields) -> Fields:
    """The one set of rotary parameters; one per type of layer is all right where they are the same."""
    nothing = Fields({}, config.where)
    scaling = config.nested("rope_scaling")
    if scaling is None or not scaling.values:
        scaling = config.nested("rope_parameters") or nothing
    inner = [value for value in scaling.values.values() if isinstance(value, dict)]
    if not inner:
        return scaling
    if any(value != inner[0] for value in inner):
        raise ModelError(
            f"{scaling.where} differs between types of layers, which Weft does not compute; use another model"
        )
    return Fields(inner[0], scaling.where)
