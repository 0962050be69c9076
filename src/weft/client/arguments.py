"""From Python keywords, vLLM's among them, to an EngineConfig."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from weft.config import EngineConfig
from weft.errors import ConfigError, nearest_name

log = logging.getLogger("weft")

EXECUTORS = {"mp": "processes", "uni": "inline"}  # from vLLM's names

# Names for the same in other libraries.
HABITS = {
    "context_length": "max_model_len",
    "ctx_size": "max_model_len",
    "load_in_4bit": "quantization",
    "load_in_8bit": "quantization",
    "max_seq_len": "max_model_len",
    "n_ctx": "max_model_len",
    "num_ctx": "max_model_len",
    "num_gpus": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "token": "hf_token",
    "torch_dtype": "dtype",
    "tp": "tensor_parallel_size",
}

# Of vLLM's LLM: what is so anyway, or cannot matter here.
IDLE = [
    "trust_remote_code",
    "disable_log_stats",
    "enable_chunked_prefill",
    "disable_custom_all_reduce",
    "use_tqdm_on_load",
]

# And what Weft does not have.
MISSING = [
    "additional_config",
    "allowed_local_media_path",
    "allowed_media_domains",
    "attention_config",
    "calculate_kv_scales",
    "code_revision",
    "compilation_config",
    "convert",
    "cpu_offload_gb",
    "data_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "enable_lora",
    "enable_sleep_mode",
    "guided_decoding_backend",
    "hf_overrides",
    "kv_transfer_config",
    "limit_mm_per_prompt",
    "logits_processors",
    "max_logprobs",
    "max_lora_rank",
    "max_loras",
    "max_seq_len_to_capture",
    "mm_processor_kwargs",
    "model_impl",
    "num_gpu_blocks_override",
    "num_lookahead_slots",
    "override_generation_config",
    "override_pooler_config",
    "pooler_config",
    "preemption_mode",
    "reasoning_parser",
    "rope_scaling",
    "rope_theta",
    "runner",
    "structured_outputs_config",
    "swap_space",
    "task",
    "tokenizer_mode",
    "tokenizer_revision",
]


def engine_config(model: str | os.PathLike[str], said: Mapping[str, Any]) -> EngineConfig:
    """The config that `said` describes, None being as good as unsaid. ConfigError, with the nearest name, for
    a keyword that nobody knows, and for a value of the wrong type; a warning for vLLM's that Weft lacks."""
    known = {field.name for field in fields(EngineConfig)} - {"model"}
    given: dict[str, Any] = {}
    for name, value in said.items():
        if name in known:
            given[name] = value
        elif name == "distributed_executor_backend":
            given["executor"] = EXECUTORS.get(value, value)
        elif name in MISSING:
            if value is not None:
                log.warning("%s: Weft does not have it; it is ignored", name)
        elif name not in IDLE:
            suggestion = nearest_name(name, [*known, "distributed_executor_backend"], HABITS)
            raise ConfigError(f"unknown argument {name!r}{suggestion}")
    if "dtype" in given:
        given["dtype"] = str(given["dtype"]).removeprefix("torch.")  # torch.bfloat16 will do as well
    if given.get("plan") is not None:
        given["plan"] = os.fspath(given["plan"])
    share = given.get("gpu_memory_utilization")
    if isinstance(share, int | float):
        given["gpu_memory_utilization"] = (share,)
    unset = {name for name, value in given.items() if value is None}
    try:
        return msgspec.convert(
            {"model": os.fspath(model), **{name: value for name, value in given.items() if name not in unset}},
            EngineConfig,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}".replace("`$.", "`")) from None
