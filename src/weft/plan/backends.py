"""Attention backends: their names, and the checks that one can run a model on the devices of a plan."""

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
# vLLM's names of attention backends that Weft has under another name.
VLLM_BACKENDS = {
    "torch_sdpa": "torch",
    "cpu_attn": "cpu",
    "triton_attn": "triton",
    "flash_attn": "varlen",
}
# Each backend's kernels, as messages name them.
KERNELS = {
    "cpu": "the compiled CPU kernels",
    "triton": "the Triton kernels",
    "flashinfer": "FlashInfer's kernels",
    "varlen": "torch's varlen kernels",
}
FP8_BACKENDS = ("auto", "triton", "flashinfer")  # these read an FP8 cache
FLASH_CAPABILITY = (8, 0)  # oldest GPUs that FlashAttention 2 supports, in torch and in FlashInfer
FLASH_DTYPES = ("bfloat16", "float16")
FLASHINFER, OLDEST_FLASHINFER = "flashinfer-python", (0, 5)
FLASHINFER_HEADS = (64, 128, 256)  # head dims that its kernels are tested with
WIDEST_FLASH_HEAD, FLASH_HEAD_UNIT = 256, 8
NO_TRITON = "the package triton is not installed"
TRITON_CAPABILITY = (7, 5)  # oldest GPUs that Triton compiles for
WIDEST_HEAD = 256  # head dims; wider tiles do not fit the shared memory of a multiprocessor

Card = tuple[str, tuple[int, int]]  # a GPU's name and compute capability


def weft_backend(name: str) -> str:
    """Weft's name of an attention backend, given that name or vLLM's, in any case."""
    word = name.lower().removesuffix("_vllm_v1")
    return VLLM_BACKENDS.get(word, word)


def check_backend_name(name: str) -> None:
    """Raise ConfigError for a name that is neither Weft's nor vLLM's name of an attention backend."""
    if weft_backend(name) not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise ConfigError(f"attention_backend is {name!r}; it must be one of {known}", code="unknown-choice")


def with_attention_backend(
    config: EngineConfig, shape: ModelShape, dtype: DType, host: Host, devices: Sequence[str]
) -> EngineConfig:
    """Set the config's attention backend under Weft's name; VLLM_ATTENTION_BACKEND counts if the config says auto.

    Raises ConfigError for a configured backend that cannot run this model on these devices, before any weight is read.
    """

    def obstacle(backend: str) -> str | None:
        return _wrong_device(backend, host, devices) or _unsupported(backend, shape, dtype, host, devices)

    wanted = host.environment.get("VLLM_ATTENTION_BACKEND", "")
    backend = weft_backend(config.attention_backend)
    if wanted and backend == "auto":
        theirs, fp8 = weft_backend(wanted), config.kv_cache_dtype != "auto"
        if theirs in (FP8_BACKENDS if fp8 else ATTENTION_BACKENDS) and obstacle(theirs) is None:
            return replace(config, attention_backend=theirs)
        # The variable is set for vLLM, which may well run beside us: no reason to stop.
        logger.warning(
            "VLLM_ATTENTION_BACKEND is %s, which Weft does not have here: it takes its own choice", wanted.upper()
        )
    elif reason := obstacle(backend):
        raise ConfigError(reason)
    return replace(config, attention_backend=backend)


def _wrong_device(backend: str, host: Host, devices: Sequence[str]) -> str | None:
    """Message for a GPU backend on a CPU, unless Triton's interpreter is on, or the CPU backend on GPUs; else None."""
    if devices[0] != "cpu":
        if backend != "cpu":
            return None
        return f"attention_backend is cpu, which runs on a CPU; on GPUs it is auto, {', '.join(GPU_BACKENDS)} or torch"
    if backend not in GPU_BACKENDS or host.environment.get("TRITON_INTERPRET") == "1":
        return None
    return f"attention_backend is {backend}, which runs on GPUs; on a CPU it is auto, cpu or torch"


def _unsupported(backend: str, shape: ModelShape, dtype: DType, host: Host, devices: Sequence[str]) -> str | None:
    """Message for a backend that lacks a package or cannot run the model; None if nothing is known against it.

    The check tries nothing: kernels may still fail to compile.
    """
    if backend == "cpu":
        reason = build.native_obstacle(dtype, shape.head_dim, shape.group)
        return None if reason is None else refusal(KERNELS["cpu"], reason)
    if backend not in GPU_BACKENDS:
        return None
    cards = [(gpu.name, gpu.capability) for gpu in host.gpus_of(devices)]  # empty: Triton's interpreter is any GPU
    # Triton kernels do all but the attention for every GPU backend.
    reason = no_triton(shape.head_dim, cards) if "triton" in host.packages else NO_TRITON
    if reason is not None:
        return refusal(KERNELS["triton"], reason)
    if backend == "triton" or not cards:
        return None
    installed = host.packages.get(FLASHINFER)
    reason = no_flashinfer(installed, shape.head_dim) if backend == "flashinfer" else no_varlen(shape.head_dim)
    reason = reason or no_flash(dtype, cards)
    return None if reason is None else refusal(KERNELS[backend], reason)


def refusal(kernels: str, obstacle: str) -> str:
    """Message for kernels that the user chose and that cannot be used."""
    return f"{kernels} cannot be used: {obstacle}; --attention-backend torch always works"


def no_triton(head_dim: int, cards: Iterable[Card]) -> str | None:
    """Reason that the Triton kernels cannot run a model on these GPUs; None if they can."""
    if head_dim > WIDEST_HEAD:
        return f"their heads have up to {WIDEST_HEAD} dims, this model's {head_dim}"
    return _too_old(cards, TRITON_CAPABILITY)


def no_flashinfer(version: str | None, head_dim: int) -> str | None:
    """Reason that FlashInfer cannot be used, given its installed version (None: not installed); None if it can."""
    if version is None:
        return f"the package {FLASHINFER} is not installed (pip install weft[cuda])"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_FLASHINFER:
        return f"{FLASHINFER} {version} is older than {format_version(OLDEST_FLASHINFER)}"
    if head_dim not in FLASHINFER_HEADS:
        return f"its heads have {', '.join(map(str, FLASHINFER_HEADS))} dims, and this model's {head_dim}"
    return None


def no_varlen(head_dim: int) -> str | None:
    """Reason that torch's varlen attention cannot be used for a model; None if it can."""
    if head_dim <= WIDEST_FLASH_HEAD and head_dim % FLASH_HEAD_UNIT == 0:
        return None
    most, unit = WIDEST_FLASH_HEAD, FLASH_HEAD_UNIT
    return f"its heads have up to {most} dims, in multiples of {unit}, this model's {head_dim}"


def no_flash(dtype: str, cards: Iterable[Card]) -> str | None:
    """Reason that FlashAttention cannot run on these GPUs; None if it can."""
    if dtype not in FLASH_DTYPES:
        return f"they compute in {' and '.join(FLASH_DTYPES)}, not in {dtype}"
    return _too_old(cards, FLASH_CAPABILITY)


def _too_old(cards: Iterable[Card], needed: tuple[int, int]) -> str | None:
    """Reason that kernels which need a compute capability cannot run on the first older GPU; None if there is none."""
    for name, capability in cards:
        if capability < needed:
            return f"{name} has compute capability {format_version(capability)}, and they need {format_version(needed)}"
    return None


def no_narrow_cache(dtype: str, cards: Sequence[Card]) -> str | None:
    """Reason that Weft's engine has no 8-bit KV cache on these GPUs (none given: on a CPU); None if it has."""
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
    """KV cache dtype of the plan: "auto" or "fp8". Raises ConfigError if the GPUs or the backend have no FP8 cache."""
    requested, backend = config.kv_cache_dtype, config.attention_backend
    if requested == "auto":
        return "auto"
    if reason := no_narrow_cache(requested, [(gpu.name, gpu.capability) for gpu in host.gpus_of(devices)]):
        raise ConfigError(reason)
    if backend not in FP8_BACKENDS:
        raise ConfigError(
            f"--attention-backend {backend} reads no {requested} KV cache; {', '.join(FP8_BACKENDS)} do, or leave "
            "--kv-cache-dtype out"
        )
    return "fp8"
