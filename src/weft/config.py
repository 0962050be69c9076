"""EngineConfig: every option of an engine, and the only place for its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Names are the flags' names: `--max-model-len` is `max_model_len`.

    None leaves the decision to the planner. Lengths are in tokens. `executor` is "inline" (ranks as threads of this
    process) or "processes"; None means inline for one rank, and processes for several ranks and in `weft serve`.
    `gpu_memory_utilization` is a share of each GPU's total memory, one figure for all ranks or one for each.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    hf_token: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"  # auto, safetensors, gguf, dummy
    dtype: str = "auto"  # auto, bfloat16, float16, float32
    quantization: str = "auto"  # auto: the checkpoint's own; none: dequantised; int4, int8, ...: quantised at load
    seed: int = 0
    generation_config: str = "auto"  # auto: the model's sampling defaults; vllm: SamplingParams' own
    chat_template: str | None = None
    plan: str | None = None  # a file written by weft plan --json, to be executed
    tensor_parallel_size: int | None = None
    tensor_split: tuple[float, ...] | None = None
    pipeline_parallel_size: int | None = None
    pipeline_split: tuple[int, ...] | None = None
    device_map: dict[str, int | str] | str | None = None  # modules to devices, or auto, balanced, sequential, ...
    max_memory: dict[int | str, int | str] | None = None  # of each device to be used: bytes, or a text such as "40GB"
    executor: str | None = None
    device: str = "auto"  # auto, cpu, cuda
    device_ids: tuple[int, ...] | None = None
    gpu_memory_utilization: tuple[float, ...] = (0.9,)
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"  # auto: as dtype; fp8 on GPUs that have it
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: chosen for the model and its devices (planner.batch)
    max_num_queued_reqs: int = 1024
    scheduling_policy: str = "fcfs"  # fcfs, priority
    async_scheduling: bool | None = None  # schedule a step before the tokens of the last are known; None: on GPUs
    attention_backend: str = "auto"  # auto, torch, cpu, triton, flashinfer, varlen
    speculative_config: dict[str, Any] | None = None  # vLLM's: {"method": "ngram"} or {"model": NAME}, and more
    enforce_eager: bool = False  # no CUDA graphs


DEFAULT_CONFIG = EngineConfig(model="")  # all defaults
