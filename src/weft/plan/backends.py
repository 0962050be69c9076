"""Attention backends: their names, and why one cannot run a model on the devices of a plan."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from weft.architectures.shape import DType, ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.formatting import format_version
from weft.hardware.gpus import FP8_CAPABILITY
from weft.hardware.host import Host
from weft.native import build

logger = logging.getLogger("weft")

GPU_BACKENDS = ("triton", "flashinfer", "varlen")
ATTENTION_BACKENDS = ("auto", "torch", "cpu", *GPU_BACKENDS)
VLLM_BACKENDS = {
    "torch_sdpa": "torch",
    "cpu_attn": "cpu",
    "triton_attn": "triton",
    "flash_attn": "varlen",
}  # of its names for attention backends, those that we have under another
KERNELS = {
    "cpu": "the compiled CPU kernels",
    "triton": "the Triton kernels",
    "flashinfer": "FlashInfer's kernels",
    "varlen": "torch's varlen kernels",
}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # the last two are one
FP8_BACKENDS = ("auto", "triton", "flashinfer")  # that read an FP8 cache
FLASH_CAPABILITY = (8, 0)  # of a GPU that FlashAttention's second version, in torch as in FlashInfer, is written for
FLASH_DTYPES = ("bfloat16", "float16")
FLASHINFER, OLDEST_FLASHINFER = "flashinfer-python", (0, 5)
FLASHINFER_HEADS = (64, 128, 256)  # dims that its kernels are tested with
WIDEST_FLASH_HEAD, FLASH_HEAD_UNIT = 256, 8
NO_TRITON = "the package triton is not installed"
TRITON_CAPABILITY = (7, 5)  # of the oldest GPU that Triton compiles for
WIDEST_HEAD = 256  # dims whose tiles fit the memory of a multiprocessor

Card = tuple[str, tuple[int, int]]  # a GPU's name and compute capability


def own_backend(name: str) -> str:
    """An attention backend in our words, from those or from vLLM's, which are upper case."""
    word = name.lower().removesuffix("_vllm_v1")
    return VLLM_BACKENDS.get(word, word)


def with_backend(
    config: EngineConfig, shape: ModelShape, dtype: DType, host: Host, devices: Sequence[str]
) -> EngineConfig:
    """The config with its attention backend in our words, the environment's where it leaves that open. Raises
    ConfigError for one that cannot run this model on these devices, before anything is read."""

    def obstacle(backend: str) -> str | None:
        return misplaced(backend, host, devices) or unusable(backend, shape, dtype, host, devices)

    wanted = host.environment.get("VLLM_ATTENTION_BACKEND", "")
    backend = own_backend(config.attention_backend)
    if wanted and backend == "auto":
        theirs, fp8 = own_backend(wanted), config.kv_cache_dtype != "auto"
        if theirs in (FP8_BACKENDS if fp8 else ATTENTION_BACKENDS) and obstacle(theirs) is None:
            return replace(config, attention_backend=theirs)
        # It is set for vLLM, which may well run beside us: no reason to stop.
        logger.warning(
            "VLLM_ATTENTION_BACKEND is %s, which Weft does not have here: it takes its own choice", wanted.upper()
        )
    elif reason := obstacle(backend):
        raise ConfigError(reason)
    return replace(config, attention_backend=backend)


def misplaced(backend: str, host: Host, devices: Sequence[str]) -> str | None:
    """Why kernels of GPUs do not run on a CPU, unless Triton's interpreter is on, nor those of a CPU on GPUs."""
    on_cpu, interprets = devices[0] == "cpu", host.environment.get("TRITON_INTERPRET") == "1"
    if (backend not in GPU_BACKENDS if on_cpu else backend != "cpu") or (interprets and on_cpu):
        return None
    there, here, known = "GPUs", "a CPU", "auto, cpu or torch"
    if not on_cpu:
        there, here, known = here, there, f"auto, {', '.join(GPU_BACKENDS)} or torch"
    return f"attention_backend is {backend}, which runs on {there}; on {here} it is {known}"


def unusable(backend: str, shape: ModelShape, dtype: DType, host: Host, devices: Sequence[str]) -> str | None:
    """What a backend that was asked for lacks, as far as it is known before it is tried: not whether it compiles."""
    gpus = host.named(devices)  # none: Triton's interpreter is any GPU
    if backend == "cpu":
        reason = build.native_obstacle(dtype, shape.head_dim, shape.q_heads // shape.kv_heads)
    elif backend not in GPU_BACKENDS:
        return None
    elif "triton" not in host.packages:  # which does the rest for all of them
        backend, reason = "triton", NO_TRITON
    elif reason := no_triton(shape.head_dim, [(gpu.name, gpu.capability) for gpu in gpus]):
        backend = "triton"
    elif backend == "triton" or not gpus:
        return None
    elif backend == "flashinfer":
        reason = no_flashinfer(host.packages.get(FLASHINFER), shape.head_dim)
    else:
        reason = no_varlen(shape.head_dim)
    if reason is None and gpus:
        reason = no_flash(dtype, [(gpu.name, gpu.capability) for gpu in gpus])
    return None if reason is None else refusal(KERNELS[backend], reason)


def refusal(kernels: str, obstacle: str) -> str:
    """Of kernels that the user asked for."""
    return f"{kernels} cannot be used: {obstacle}; --attention-backend torch always works"


def no_triton(head_dim: int, cards: Iterable[Card]) -> str | None:
    """Why the Triton kernels do not run a model on these GPUs."""
    if head_dim > WIDEST_HEAD:
        return f"their heads have up to {WIDEST_HEAD} dims, this model's {head_dim}"
    for name, capability in cards:
        if capability < TRITON_CAPABILITY:
            needed = format_version(TRITON_CAPABILITY)
            return f"{name} has compute capability {format_version(capability)}, and they need {needed}"
    return None


def no_flashinfer(version: str | None, head_dim: int) -> str | None:
    """Why FlashInfer, of which this version is installed, cannot be used for a model."""
    if version is None:
        return f"the package {FLASHINFER} is not installed (pip install weft[cuda])"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_FLASHINFER:
        return f"{FLASHINFER} {version} is older than {format_version(OLDEST_FLASHINFER)}"
    if head_dim not in FLASHINFER_HEADS:
        return f"its heads have {', '.join(map(str, FLASHINFER_HEADS))} dims, and this model's {head_dim}"
    return None


def no_varlen(head_dim: int) -> str | None:
    """Why torch's varlen attention cannot be used for a model."""
    if head_dim <= WIDEST_FLASH_HEAD and head_dim % FLASH_HEAD_UNIT == 0:
        return None
    most, unit = WIDEST_FLASH_HEAD, FLASH_HEAD_UNIT
    return f"its heads have up to {most} dims, in multiples of {unit}, this model's {head_dim}"


def no_flash(dtype: str, cards: Iterable[Card]) -> str | None:
    """Why FlashAttention does not run on these GPUs."""
    if dtype not in FLASH_DTYPES:
        return f"they compute in {' and '.join(FLASH_DTYPES)}, not in {dtype}"
    for name, capability in cards:
        if capability < FLASH_CAPABILITY:
            needed = format_version(FLASH_CAPABILITY)
            return f"{name} has compute capability {format_version(capability)}, and they need {needed}"
    return None


def no_narrow_cache(dtype: str, cards: Sequence[Card]) -> str | None:
    """Why our own engine keeps no KV cache of 8 bits on these GPUs, or on a CPU where there are none."""
    if not cards:
        return f"weft keeps no {dtype} KV cache on a CPU; leave --kv-cache-dtype out"
    for name, capability in cards:
        if capability < FP8_CAPABILITY:
            return (
                f"{name} has compute capability {format_version(capability)}; weft's {dtype} KV cache needs "
                f"{format_version(FP8_CAPABILITY)}: leave --kv-cache-dtype out"
            )
    return None


def kv_cache_dtype(config: EngineConfig, host: Host, devices: Sequence[str]) -> str:
    """auto, or fp8 where the GPUs and the attention backend have it."""
    asked, backend = config.kv_cache_dtype, config.attention_backend
    if asked == "auto":
        return "auto"
    if reason := no_narrow_cache(asked, [(gpu.name, gpu.capability) for gpu in host.named(devices)]):
        raise ConfigError(reason)
    if backend not in FP8_BACKENDS:
        raise ConfigError(
            f"--attention-backend {backend} reads no {asked} KV cache; {', '.join(FP8_BACKENDS)} do, or leave "
            "--kv-cache-dtype out"
        )
    return "fp8"
