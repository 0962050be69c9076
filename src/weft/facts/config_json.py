"""config.json and generation_config.json, as Transformers 4 and 5 write them, and each architecture's defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.errors import ModelError
from weft.facts.fields import Fields
from weft.facts.parameters import ARCHITECTURES
from weft.facts.shape import DType, ModelShape, Rope

CONFIG, GENERATION = "config.json", "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32"}
THETA = 10000.0
NORM_EPS = 1e-6


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What Transformers takes where config.json does not say: the fields that differ between architectures.

    `bias`: "config" asks `attention_bias`, for q, k, v and o; "qkv" always has those three; "none" never any.
    `window`: "none", "all" layers, or "some" of them, as `use_sliding_window` and the layers' types say.
    """

    model_type: str
    max_positions: int
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size over query heads
    bos: int | None = None
    eos: tuple[int, ...] = ()
    bias: str = "config"
    mlp_bias: bool = False  # whether `mlp_bias` is asked
    qk_norm: bool = False
    window: str = "none"


DEFAULTS = {
    "LlamaForCausalLM": Defaults(model_type="llama", max_positions=2048, bos=1, eos=(2,), mlp_bias=True),
    "MistralForCausalLM": Defaults(
        model_type="mistral", max_positions=131072, kv_heads=8, bos=1, eos=(2,), bias="none", window="all"
    ),
    "Qwen2ForCausalLM": Defaults(model_type="qwen2", max_positions=32768, kv_heads=32, bias="qkv", window="some"),
    "Qwen3ForCausalLM": Defaults(
        model_type="qwen3", max_positions=32768, kv_heads=32, head_dim=128, qk_norm=True, window="some"
    ),
}
SLIDING_WINDOW = 4096  # tokens, where an architecture with windows does not say
MAX_WINDOW_LAYERS = 28  # the first layers of Qwen, which have none


def read(folder: Path, own: DType) -> ModelShape:
    """The shape in a directory's config.json; `own` is the dtype of its tensors, taken where the config has none.

    Its end tokens are those of config.json and of generation_config.json together. Raises ModelError, in one
    line, for what is missing, wrong, impossible or unknown.
    """
    config = _object(folder / CONFIG)
    generation = folder / GENERATION
    more = _object(generation).ids("eos_token_id") if generation.exists() else ()
    model = shape(config, own)
    return msgspec.structs.replace(model, eos=tuple(dict.fromkeys(model.eos + more)))


def sampling(folder: Path) -> dict[str, float | int | bool]:
    """What generation_config.json recommends, in its own words; {} where there is none."""
    if not (folder / GENERATION).exists():
        return {}
    fields = _object(folder / GENERATION)
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


def _object(path: Path) -> Fields:
    try:
        return Fields(msgspec.json.decode(path.read_bytes(), type=dict[str, object]), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
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


def shape(config: Fields, own: DType = "bfloat16") -> ModelShape:
    """The shape that a config gives, its architecture's defaults filled in."""
    name = architecture(config)
    default = DEFAULTS[name]
    _refuse(config)
    hidden, q_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers")
    head_dim = config.integer_or("head_dim", default.head_dim)
    if head_dim is None and hidden % q_heads:
        raise ModelError(f"{config.where}: hidden_size {hidden} is no multiple of the {q_heads} num_attention_heads")
    max_positions = config.integer_or("max_position_embeddings", None) or default.max_positions
    bias = default.bias == "config" and config.flag("attention_bias")
    rotary = rope(config, max_positions)
    return ModelShape(
        architecture=name,
        layers=layers,
        hidden=hidden,
        q_heads=q_heads,
        kv_heads=config.integer_or("num_key_value_heads", default.kv_heads) or q_heads,
        head_dim=head_dim or hidden // q_heads,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=rotary.reach(max_positions),
        norm_eps=config.number_or("rms_norm_eps", None) or NORM_EPS,
        rope=rotary,
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=bias or default.bias == "qkv",
        out_bias=bias,
        mlp_bias=default.mlp_bias and config.flag("mlp_bias"),
        qk_norm=default.qk_norm,
        windows=windows(config, default, layers),
        dtype=dtype(config) or own,
        bos=config.integer_or("bos_token_id", default.bos, minimum=0),
        eos=config.ids("eos_token_id", default.eos),
    )


def _refuse(config: Fields) -> None:
    """What these architectures may say that Weft would compute wrongly if it were ignored."""
    quantised = config.nested("quantization_config") or config.nested("compression_config")
    if quantised is not None and quantised.values:
        method = quantised.text_or("quant_method", "an unknown method")
        raise ModelError(
            f"{config.where}: the weights are quantised with {method}, which Weft does not read; use the "
            "unquantised checkpoint or a GGUF file"
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
    if not config.flag("use_sliding_window"):
        return ()
    types = config.values.get("layer_types")
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
    theta = scaling.number_or("rope_theta", None) or config.number_or("rope_theta", None) or THETA
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
        raise ModelError(f"{scaling.where} differs between types of layers, which Weft does not compute")
    return Fields(inner[0], scaling.where)
