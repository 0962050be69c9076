"""Conversion of Python keywords, vLLM's among them, to an EngineConfig."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from weft.checkpoint.hub import model_names
from weft.config import EngineConfig, declared_options
from weft.engine.client.vllm import vllm_arguments
from weft.errors import ConfigError, nearest_name
from weft.logs import event_fields
from weft.plan.layout import check_config

log = logging.getLogger("weft")

OPTIONS = declared_options(EngineConfig)
# The field of each keyword.
FIELDS = {name: name for name in OPTIONS if name != "model"} | {
    option.flag.replace("-", "_"): name for name, option in OPTIONS.items() if option.flag
}

# Names of the same keywords in other libraries.
OTHER_NAMES = {
    "context_length": "max_model_len",
    "ctx_size": "max_model_len",
    "max_seq_len": "max_model_len",
    "n_ctx": "max_model_len",
    "num_ctx": "max_model_len",
    "num_gpus": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "token": "hf_token",
    "torch_dtype": "dtype",
    "tp": "tensor_parallel_size",
}

# Transformers' keywords for weights that are rounded as they are read, and the `quantization` that does so.
LOAD_IN = {"load_in_8bit": "int8", "load_in_4bit": "int4"}

# Keywords of vLLM's LLM that ask for what Weft does anyway, or that cannot matter here: not worth a warning.
SILENT = (
    "trust_remote_code",
    "disable_log_stats",
    "enable_chunked_prefill",
    "disable_custom_all_reduce",
    "use_tqdm_on_load",
)


def engine_config(model: str | os.PathLike[str], keywords: Mapping[str, Any]) -> EngineConfig:
    """Return the EngineConfig that `keywords` describe. `model` may be a short name, as in `qwen3:8b`.

    A keyword with the value None counts as left out. Raises ConfigError for an unknown keyword, with the nearest name,
    for a value of the wrong type or out of range, and for vLLM's keywords that Weft refuses. Warns about keywords that
    Weft ignores.
    """
    given: dict[str, Any] = {}
    for name, value in _with_quantization(keywords).items():
        if name in FIELDS:
            given[FIELDS[name]] = value
        elif name not in SILENT:
            check_vllm_argument(name, value, FIELDS)
    values = {name: _converted(name, value) for name, value in given.items() if value is not None}
    typed = os.fspath(model)
    full = model_names.full_name(typed, folder=values.get("download_dir"))
    if message := model_names.notice(typed, full):
        log.info(message)
    try:
        config = msgspec.convert({"model": full, **values}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}".replace("`$.", "`"), code="invalid-argument") from None
    check_config(config)
    return config


def _with_quantization(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `load_in_8bit` and `load_in_4bit` by the `quantization` that they stand for.

    Raises ConfigError for both at once, and for another quantization with either of them.
    """
    for name in LOAD_IN:
        if not isinstance(keywords.get(name), bool | None):
            raise ConfigError(f"{name} is {keywords[name]!r}; it must be True or False", code="invalid-argument")
    wanted = [name for name in LOAD_IN if keywords.get(name)]
    others = {name: value for name, value in keywords.items() if name not in LOAD_IN}
    if not wanted:
        return others
    own = others.get("quantization")
    if len(wanted) > 1 or own not in (None, "auto", LOAD_IN[wanted[0]]):
        second = wanted[1] if len(wanted) > 1 else f"quantization={own!r}"
        raise ConfigError(f"{wanted[0]} and {second} ask for different weights; give one", code="two-quantizations")
    return others | {"quantization": LOAD_IN[wanted[0]]}


def _converted(name: str, value: Any) -> Any:
    """Return a keyword's value in the type that EngineConfig has for it."""
    if name == "dtype":
        return str(value).removeprefix("torch.")  # torch.bfloat16 is accepted too
    if name == "plan":
        return os.fspath(value)
    if name == "gpu_memory_utilization" and isinstance(value, int | float):
        return (value,)
    return value


def check_vllm_argument(name: str, value: Any, known: Collection[str]) -> None:
    """Warn about a keyword of vLLM's LLM that Weft ignores.

    Raises ConfigError for an argument that changes what is served, and for a keyword that is neither vLLM's nor in
    `known`.
    """
    flag = vllm_arguments().get(name.replace("_", "-"))
    if flag is None:
        suggestion = nearest_name(name, known, OTHER_NAMES)
        raise ConfigError(f"unknown argument {name!r}{suggestion}", code="unknown-argument")
    if why := flag.refusal(value):
        raise ConfigError(f"{name}={value!r}: {why}", code="refused-vllm-argument")
    if value is not None and not flag.refused:
        log.warning("%s: %s", name, flag.warning, extra=event_fields("argument-ignored", name=name))
