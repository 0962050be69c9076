"""Model shape, sampling and precision from config.json and generation_config.json, of Transformers 4 and 5."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import msgspec

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields
from weft.checkpoint.architectures.registry import ARCHITECTURES, RUNNABLE, find_architecture
from weft.checkpoint.architectures.shape import DType, ModelShape, Norm
from weft.checkpoint.config import library
from weft.checkpoint.config.layers import ACTIVATIONS, read_activation, read_layers, with_defaults
from weft.checkpoint.files import limits
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.model_file import read_model_file
from weft.checkpoint.quantised import registry
from weft.checkpoint.quantised.stored_types import with_config_types
from weft.errors import ModelError

CONFIG, GENERATION = "config.json", "generation_config.json"
QUANTIZE = "quantize_config.json"  # AutoGPTQ's own file; newer checkpoints have these fields in config.json
# Sampling parameters that checkpoints recommend, and their keys in GGUF files, behind "general.sampling.".
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
CHAT_FORMATS = ("chatml", "raw")
DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32"}
# Fields that change what a model computes in a way that Weft does not, and flags with the only value that it computes.
REFUSED = ("attn_logit_softcapping", "final_logit_softcapping")
FLAGS = {
    "layer_norm_elementwise_affine": True,  # of OPT
    "scale_attn_weights": True,  # this and the next two of GPT-2
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "no_bias": True,  # of Qwen v1
}


def read_shape(folder: Path, own: DType = "bfloat16", *, run: bool = True, model_impl: str = "auto") -> ModelShape:
    """Read the shape from a directory's config.json; `own` is the tensors' dtype, the default of the config's.

    End tokens come from config.json and generation_config.json together. Raises ModelError, in one line, for values
    that are missing, wrong, impossible or unknown; with `run`, also for values that the engine does not compute.
    `model_impl` is EngineConfig's.
    """
    config = load_config(folder)
    generation = folder / GENERATION
    end_tokens = load_json(generation).token_ids("eos_token_id") if generation.exists() else ()
    shape = shape_from_config(config, own, run=run, model_impl=model_impl)
    return msgspec.structs.replace(shape, eos=tuple(dict.fromkeys(shape.eos + end_tokens)))


def recommended_sampling(folder: Path) -> dict[str, float | int | bool]:
    """Sampling that generation_config.json recommends, by its own names; {} if there is no such file."""
    if not (folder / GENERATION).exists():
        return {}
    fields = load_json(folder / GENERATION)
    sampling: dict[str, float | int | bool] = {}
    for name in (*SAMPLING, "max_new_tokens"):
        value = fields.values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.wrong_value(name, "a number")
        sampling[name] = value
    if "do_sample" in fields:
        sampling["do_sample"] = fields.flag("do_sample")
    return sampling


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the first Qwen models' generation_config.json.

    - `chat_format`: "chatml", or "raw" for models that only continue a text.
    - `window`: tokens of a conversation, without its last message; the oldest turns beyond are left out.
    """

    chat_format: str | None = None
    window: int | None = None


def chat_settings(folder: Path) -> ChatSettings:
    """The `ChatSettings` of a directory; all None if it has no generation_config.json. Raises ModelError."""
    if not (folder / GENERATION).exists():
        return ChatSettings()
    fields = load_json(folder / GENERATION)
    chat_format = fields.text_or("chat_format", None)
    if chat_format not in (None, *CHAT_FORMATS):
        raise fields.wrong_value("chat_format", " or ".join(CHAT_FORMATS))
    return ChatSettings(chat_format=chat_format, window=fields.integer_or("max_window_size", None))


def load_config(folder: Path) -> Fields:
    """Read a directory's config.json; an AutoGPTQ file next to it becomes its `quantization_config`."""
    config, gptq_file = load_json(folder / CONFIG), folder / QUANTIZE
    if quantization(config) is not None or not gptq_file.exists():
        return config
    return Fields(
        {**config.values, "quantization_config": {"quant_method": "gptq", **load_json(gptq_file).values}}, config.where
    )


def load_json(path: Path) -> Fields:
    """Read the fields of a JSON file. Raises ModelError if the file cannot be read or is damaged."""
    try:
        text = read_model_file(path, limits.CONFIG_BYTES, code="cannot-read-config")
        fields = Fields(msgspec.json.decode(text, type=dict[str, object]), str(path))
        limits.check_unique(text, str(path))
        return fields
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error!s:.200}; fetch it again", code="damaged-config") from error


def architecture(config: Fields) -> str:
    """Name of the model's architecture: the first known one in `architectures`; by `model_type` without that list."""
    names = config.values.get("architectures") or []
    if not isinstance(names, list):
        raise config.wrong_value("architectures", "a list of names")
    if not names:
        kind = config.text_or("model_type", None)
        known = ((name, entry.config) for name, entry in ARCHITECTURES.items())
        names = [name for name, own in known if kind in (own.model_type, *own.other_types)] or [kind]
    for name in names:
        if (own_name := _own_name(name)) is not None:
            return own_name
    missing = "" if library.is_installed() else f"; {library.EXTRA} adds Transformers' architectures"
    raise ModelError(
        f"{config.where}: unknown architecture {names[0]!r:.80}; known: {', '.join(ARCHITECTURES)}{missing}",
        code="unknown-architecture",
    )


def _is_foreign(config: Fields) -> bool:
    """Return True if Transformers has a class for the model, and Weft has no table of it."""
    names = config.values.get("architectures")
    if not isinstance(names, list) or any(_own_name(name) for name in names):
        return False
    return any(isinstance(name, str) and library.knows(name) for name in names)


def _own_name(name: object) -> str | None:
    """The name by which Weft knows an architecture; the base model Qwen3Model is known as Qwen3ForCausalLM."""
    text = str(name)
    if text not in ARCHITECTURES and text.endswith("Model"):
        text = text.removesuffix("Model") + "ForCausalLM"
    return text if text in ARCHITECTURES else None


def shape_from_config(
    config: Fields, own: DType = "bfloat16", *, run: bool = True, model_impl: str = "auto"
) -> ModelShape:
    """Build the shape that a config describes, with its architecture's defaults.

    Raises ModelError as `read_shape` does. If the engine does not run the architecture, only the base of its rotary
    embedding is read.
    """
    if model_impl == "transformers" or (model_impl == "auto" and _is_foreign(config)):
        return library.shape_from_library(config, own)
    known = find_architecture(architecture(config))
    if run:
        _check_runnable(config, known)
    config, default = with_defaults(config, known.config), known.config
    hidden = config.integer("hidden_size")
    longest = config.integer_or("max_position_embeddings", None, maximum=limits.POSITIONS)
    max_positions = longest or default.max_positions
    layers = read_layers(config, known, max_positions)
    shape = ModelShape(
        architecture=known.name,
        layers=layers,
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        max_positions=layers[0].mixer.rope.reach(max_positions),
        norm=Norm(kind=default.norm, eps=_norm_eps(config, default), offset=default.norm_offset),
        embedding_dim=_embedding_dim(config, known, hidden),
        embedding_scale=hidden**0.5 if default.scaled_embedding else 1.0,
        final_norm=layers[0].norms != "residual" and not config.flag("_remove_final_layer_norm"),
        tied=config.flag("tie_word_embeddings", default.tied),
        dtype=dtype(config) or own,
        bos=config.integer_or("bos_token_id", default.bos, minimum=0),
        eos=config.token_ids("eos_token_id", default.eos),
    )
    quantised = quantization(config)
    if quantised is None or registry.unsupported_quantization(quantised) is not None:
        return shape
    return with_config_types(shape, quantised)


def _embedding_dim(config: Fields, known: Architecture, hidden: int) -> int | None:
    """Length of the embedding's rows; None if it is the hidden size."""
    width = config.integer_or("word_embed_proj_dim", hidden) if known.names.project_in else hidden
    return None if width == hidden else width


def _norm_eps(config: Fields, default: ConfigFields) -> float:
    """The epsilon of all norms: the config's, or the architecture's default."""
    given = config.number_or(default.norm_eps_field, None) if default.norm_eps_field else None
    return given or default.norm_eps


def quantization(config: Fields) -> Fields | None:
    """The config's description of its quantised weights; None if they are not quantised."""
    fields = config.nested("quantization_config") or config.nested("compression_config")
    return fields if fields is not None and fields.values else None


def precision(config: Fields) -> str | None:
    """Precision of quantised weights, a name of `checkpoint.quantised.precision`; None if the weights are not
    quantised.

    Raises ModelError for a method whose bytes Weft does not know.
    """
    quantised = quantization(config)
    if quantised is None:
        return None
    if registry.unsupported_quantization(quantised) is None:
        return registry.parse_quantization(quantised).precision
    precision = registry.precision_of_unsupported(quantised)
    if precision is None:
        method = quantised.text_or("quant_method", None) or "an unknown method"
        raise ModelError(
            f"{config.where}: the weights are quantised with {method:.80}, whose bytes Weft does "
            "not know; name the nearest format with --precision",
            code="unknown-quantization",
        )
    return precision


def _check_runnable(config: Fields, known: Architecture) -> None:
    """Raise ModelError for a config that the engine does not run, or would compute wrongly."""
    if not known.runs:
        raise ModelError(
            f"{config.where}: {known.name} is known to `weft plan`, but the engine does not run it yet; it runs "
            f"{', '.join(RUNNABLE)}",
            code="architecture-not-run",
        )
    quantised = quantization(config)
    unsupported = None if quantised is None else registry.unsupported_quantization(quantised)
    if unsupported is not None:
        raise ModelError(
            f"{config.where}: the weights are quantised with {unsupported:.200}, which Weft does not read "
            f"({registry.READ}); use one of those, the unquantised checkpoint or a GGUF file",
            code="quantization-not-read",
        )
    config = with_defaults(config, known.config)
    for key in REFUSED:
        if key in config:
            raise config.wrong_value(key, "null, since Weft does not compute it")
    for key, value in FLAGS.items():
        if config.flag(key, value) != value:
            raise config.wrong_value(key, f"{str(value).lower()}, since Weft computes nothing else")
    if read_activation(config, known) is None:
        names = ACTIVATIONS[known.config.activation] if known.names.gated else chain(*ACTIVATIONS.values())
        raise config.wrong_value("hidden_act", " or ".join(names))


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
