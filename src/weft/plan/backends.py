"""Attention backends: one table of what each can run, which the planner and the ranks judge by, and the checks of a
config against it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.checkpoint.architectures.shape import Experts, ModelShape
from weft.errors import ConfigError, PlanError
from weft.formatting import extra_hint, format_version
from weft.logs import event_fields
from weft.machine.hardware.gpus import FP8_CAPABILITY
from weft.machine.hardware.host import Host
from weft.machine.native.library import CPP_TYPES
from weft.machine.native.structures import WIDEST_GROUP, WIDEST_HEAD, WIDEST_LATENT
from weft.plan.decision import Decision

logger = logging.getLogger("weft")

FLASHINFER = "flashinfer-python"

Version = tuple[int, int]
Card = tuple[str, Version]  # a GPU's name and compute capability


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of a model, as far as backends differ in it. `group` is the number of query heads per KV head, `dtype`
    the activations', `latent_dim` the number of values of a token in the cache of a model with latent attention, else
    0."""

    head_dim: int
    group: int
    dtype: str
    fp8_cache: bool = False
    latent_dim: int = 0

    @classmethod
    def from_shape(cls, shape: ModelShape, dtype: str, *, fp8_cache: bool = False) -> AttentionSpec:
        """The attention of a model that computes in `dtype`: of the layers with the longest heads, the largest groups
        and the longest cached vectors."""
        return cls(
            head_dim=max(mixer.head_dim for mixer in shape.mixers),
            group=max(mixer.group for mixer in shape.mixers),
            dtype=dtype,
            fp8_cache=fp8_cache,
            latent_dim=max(mixer.latent_dim for mixer in shape.mixers),
        )


@dataclass(frozen=True, kw_only=True)
class KernelDevice:
    """Device that kernels shall run on: one of `cards`, or a CPU if there are none.

    `packages` are the versions of the installed `KERNEL_PACKAGES`, None if unknown. If `interpreted`, Triton's
    interpreter stands in for a GPU.
    """

    cards: Sequence[Card]
    packages: Mapping[str, str] | None
    interpreted: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """Limits of an attention backend, and the module that implements it.

    `kernels` is its name in messages. `module` is imported by the ranks alone, and has `create_attention(device,
    shape)`. The module of the backend `rest` has the other parts of the kernels: `complete_kernels(attention, device,
    shape)` and `create_rounding(device, shape)`.

    Limits: `runs_on` one kind of device, GPUs since `capability`, `dtypes` of activations. Heads have `head_dims` dims,
    or else up to `widest_head` in multiples of `head_unit`; up to `widest_group` query heads share a KV head; latents
    have up to `widest_latent` values (0: no latent attention). None: no limit. `package` is needed, with its oldest
    version if that matters; `extra` installs it.
    """

    kernels: str
    module: str
    rest: str
    runs_on: Literal["cpu", "gpu"] | None = None
    capability: Version = (0, 0)
    interpreted: bool = False
    dtypes: tuple[str, ...] | None = None
    fp8_cache: bool = False
    head_dims: tuple[int, ...] | None = None
    widest_head: int | None = None
    head_unit: int = 1
    widest_group: int | None = None
    widest_latent: int | None = 0
    package: str | None = None
    oldest: Version | None = None
    extra: str | None = None

    def supports(self, spec: AttentionSpec, device: KernelDevice) -> str | None:
        """Reason that the backend cannot run a model on a device; None if nothing is known against it.

        Nothing is tried: kernels may still fail to compile.
        """
        rest = ATTENTION_BACKENDS[self.rest]
        if rest is not self and (reason := rest.supports(spec, device)):
            return f"{rest.kernels}, which do the rest, cannot: {reason}"
        return next(filter(None, (*self._against_device(device), *self._against_spec(spec))), None)

    def _against_device(self, device: KernelDevice) -> Iterator[str | None]:
        if device.cards and self.runs_on == "cpu":
            yield "they run on a CPU, not on GPUs"
        if not device.cards and self.runs_on == "gpu":
            yield self._against_cpu(device)
        if self.package and device.packages is not None:
            installed = device.packages.get(self.package)
            yield against_version(self.package, installed, oldest=self.oldest, extra=self.extra)
        for name, capability in device.cards:
            if capability < self.capability:
                needed = format_version(self.capability)
                yield f"{name} has compute capability {format_version(capability)}, and they need {needed}"

    def _against_cpu(self, device: KernelDevice) -> str | None:
        """The reason why kernels for GPUs do not run without one, None if they are interpreted here."""
        if self.interpreted and device.interpreted:
            return None
        hint = " (TRITON_INTERPRET=1 interprets them, for tests)" if self.interpreted else ""
        return f"they run on GPUs, not on a CPU{hint}"

    def _against_spec(self, spec: AttentionSpec) -> Iterator[str | None]:
        if self.dtypes and spec.dtype not in self.dtypes:
            yield f"they compute in {' and '.join(self.dtypes)}, not in {spec.dtype}"
        yield from self._against_head_dim(spec)
        if self.widest_group and spec.group > self.widest_group:
            yield f"they take up to {self.widest_group} query heads per KV head, and this model has {spec.group}"
        yield from self._against_latents(spec)
        if spec.fp8_cache and not self.fp8_cache:
            yield "they read no FP8 KV cache"

    def _against_head_dim(self, spec: AttentionSpec) -> Iterator[str]:
        if self.head_dims and spec.head_dim not in self.head_dims:
            yield f"their heads have {', '.join(map(str, self.head_dims))} dims, this model's {spec.head_dim}"
        if self.widest_head and (spec.head_dim > self.widest_head or spec.head_dim % self.head_unit):
            unit = f", in multiples of {self.head_unit}" if self.head_unit > 1 else ""
            yield f"their heads have up to {self.widest_head} dims{unit}, this model's {spec.head_dim}"

    def _against_latents(self, spec: AttentionSpec) -> Iterator[str]:
        if spec.latent_dim and self.widest_latent == 0:
            yield "they have no latent attention"
        if self.widest_latent and spec.latent_dim > self.widest_latent:
            yield f"their latents have up to {self.widest_latent} values, this model's {spec.latent_dim}"
        if spec.latent_dim and spec.fp8_cache:
            yield "they keep no latents in 8 bits"


def against_version(package: str, installed: str | None, *, oldest: Version | None, extra: str | None) -> str | None:
    """Reason that the installed version of a package, None if there is none, is of no use; None if it is."""
    if installed is None:
        return f"the package {package} is not installed" + (f": {extra_hint(extra)}" if extra else "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])  # empty: an unknown version
    if oldest and numbers and numbers < oldest:
        return f"{package} {installed} is older than {format_version(oldest)}"
    return None


FLASH_DTYPES = ("bfloat16", "float16")  # dtypes of FlashAttention 2, in torch and in FlashInfer
FLASH_CAPABILITY = (8, 0)

ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "torch": AttentionBackend(
        kernels="the slower torch kernels", module="weft.ranks.kernels.plain", rest="torch", widest_latent=None
    ),
    "cpu": AttentionBackend(
        kernels="the compiled CPU kernels",
        module="weft.ranks.kernels.native",
        rest="cpu",
        runs_on="cpu",
        dtypes=tuple(CPP_TYPES),
        widest_head=WIDEST_HEAD,
        widest_group=WIDEST_GROUP,
        widest_latent=WIDEST_LATENT,
    ),
    "triton": AttentionBackend(
        kernels="the Triton kernels",
        module="weft.ranks.kernels.triton",
        rest="triton",
        runs_on="gpu",
        capability=(7, 5),
        interpreted=True,
        fp8_cache=True,
        widest_head=256,  # wider tiles do not fit the shared memory of a multiprocessor
        widest_latent=576,  # in two parts, of up to 512 and 64 values
        package="triton",
    ),
    "flashinfer": AttentionBackend(
        kernels="FlashInfer's kernels",
        module="weft.ranks.kernels.flashinfer",
        rest="triton",
        runs_on="gpu",
        capability=FLASH_CAPABILITY,
        dtypes=FLASH_DTYPES,
        fp8_cache=True,
        head_dims=(64, 128, 256),  # that its kernels are tested with
        package=FLASHINFER,
        oldest=(0, 5),
        extra="cuda",
    ),
    "varlen": AttentionBackend(
        kernels="torch's varlen kernels",
        module="weft.ranks.kernels.varlen",
        rest="triton",
        runs_on="gpu",
        capability=FLASH_CAPABILITY,
        dtypes=FLASH_DTYPES,
        widest_head=256,
        head_unit=8,
    ),
}
BACKEND_NAMES = ("auto", *ATTENTION_BACKENDS)
# vLLM's names of attention backends that Weft has under another name.
VLLM_BACKENDS = {
    "torch_sdpa": "torch",
    "cpu_attn": "cpu",
    "triton_attn": "triton",
    "flash_attn": "varlen",
}


def weft_backend(name: str) -> str:
    """Weft's name of an attention backend, given that name or vLLM's, in any case."""
    word = name.lower().removesuffix("_vllm_v1")
    return VLLM_BACKENDS.get(word, word)


def check_backend_name(name: str) -> None:
    """Raise ConfigError for a name that is neither Weft's nor vLLM's name of an attention backend."""
    if weft_backend(name) not in BACKEND_NAMES:
        known = ", ".join(BACKEND_NAMES)
        raise ConfigError(f"attention_backend is {name!r}; it must be one of {known}", code="unknown-choice")


def kernel_family(backend: str, *, on_cpu: bool) -> str:
    """The backend whose kernels do all but the attention; with "auto", if nothing is against them."""
    if backend == "auto":
        return "cpu" if on_cpu else "triton"
    return ATTENTION_BACKENDS[backend].rest


def runs_on_gpus(backend: str) -> bool:
    """Return True for a backend that needs GPUs."""
    return backend != "auto" and ATTENTION_BACKENDS[backend].runs_on == "gpu"


def against_fused_experts(family: str, spec: Experts) -> str | None:
    """Reason that the kernels of a family (see `kernel_family`) compute experts separately, on a GPU without CUDA
    graphs; None if they compute all experts at once. Schemes of weights make no difference."""
    if family == "torch":
        return "torch multiplies with one expert's matrices at a time"
    if spec.activation != "silu":
        return f"the Triton kernels compute experts with SiLU gates, not with {spec.activation}"
    return None


def refusal(backend: str, reason: str) -> str:
    """Message for a backend that the user chose and that cannot be used."""
    kernels = ATTENTION_BACKENDS[backend].kernels
    return f"{kernels} cannot be used: {reason}; leave --attention-backend out for the fastest that can"


def kernel_device(host: Host, devices: Sequence[str]) -> KernelDevice:
    """The devices of a plan as kernels see them."""
    return KernelDevice(
        cards=[(gpu.name, gpu.capability) for gpu in host.gpus_of(devices)],
        packages=host.packages,
        interpreted=host.environment.get("TRITON_INTERPRET") == "1",
    )


def choose_attention_backend(
    wanted: str, environment: Mapping[str, str], spec: AttentionSpec, device: KernelDevice
) -> Decision[str]:
    """The attention backend under Weft's name; VLLM_ATTENTION_BACKEND counts if the user says auto.

    Raises ConfigError for a backend of the user's that cannot run this model on these devices, before any weight is
    read.
    """
    backend = weft_backend(wanted)
    if backend == "auto":
        return _vllm_choice(environment.get("VLLM_ATTENTION_BACKEND", ""), spec, device)
    if reason := ATTENTION_BACKENDS[backend].supports(spec, device):
        raise ConfigError(refusal(backend, reason), code="attention-backend-not-usable")
    return Decision(backend, "--attention-backend")


def _vllm_choice(wanted: str, spec: AttentionSpec, device: KernelDevice) -> Decision[str]:
    """The backend that VLLM_ATTENTION_BACKEND names, or "auto" if it is not set or cannot be used.

    The variable is set for vLLM, which may well run on the same machine: no reason to stop.
    """
    name = weft_backend(wanted)
    if name in ATTENTION_BACKENDS and ATTENTION_BACKENDS[name].supports(spec, device) is None:
        return Decision(name, "VLLM_ATTENTION_BACKEND")
    if wanted and name != "auto":
        logger.warning(
            "VLLM_ATTENTION_BACKEND is %s, which Weft does not have here: it takes its own choice",
            wanted.upper(),
            extra=event_fields("attention-variable-ignored", value=wanted.upper()),
        )
    return Decision("auto", "the fastest on each device")


def check_equal_attention(shape: ModelShape) -> None:
    """Raise PlanError for a model whose layers differ in what a rank's attention kernels are made for."""
    kinds = {
        (mixer.head_counts, mixer.head_dim, mixer.scale, mixer.latent_dim, getattr(mixer, "sinks", False))
        for mixer in shape.mixers
    }
    if len(kinds) > 1:
        each = dict.fromkeys(f"{q} query and {kv} KV heads of {dim}" for (q, kv), dim, *_ in sorted(kinds))
        raise PlanError(
            f"layers of {shape.architecture} differ in their attention ({', '.join(each)}; its scale, sinks and cached "
            "vectors count too), and Weft's kernels run one kind of it in a model: serve this model with another "
            "engine",
            code="several-kinds-of-attention",
        )


def no_narrow_cache(dtype: str, cards: Sequence[Card], shape: ModelShape) -> str | None:
    """Reason that Weft's engine has no 8-bit KV cache of a model on these GPUs (none given: on a CPU); None if it
    has."""
    if shape.has_latents:
        return (
            f"weft keeps the latent vectors of {shape.architecture} in the dtype that it computes in, not in {dtype}: "
            "leave --kv-cache-dtype out"
        )
    if not cards:
        return f"weft keeps no {dtype} KV cache on a CPU; leave --kv-cache-dtype out"
    for name, capability in cards:
        if capability < FP8_CAPABILITY:
            return (
                f"{name} has compute capability {format_version(capability)}; weft's {dtype} KV cache needs "
                f"{format_version(FP8_CAPABILITY)}: leave --kv-cache-dtype out"
            )
    return None


def kv_cache_dtype(requested: str, shape: ModelShape, cards: Sequence[Card]) -> str:
    """KV cache dtype of the plan: "auto" or "fp8". Raises ConfigError if the model or the GPUs (none given: a CPU) have
    no FP8 cache."""
    if requested == "auto":
        return "auto"
    if reason := no_narrow_cache(requested, cards, shape):
        raise ConfigError(reason, code="kv-cache-dtype-not-supported")
    return "fp8"
