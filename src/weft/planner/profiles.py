"""Profiles: the constants of each engine, beyond bytes and FLOPS, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.gguf_types import MIXES
from weft.checkpoint.quantised.precision import OF_DTYPE, held_precision
from weft.checkpoint.quantised.schemes import SCHEMES, scheme_for_types
from weft.errors import ConfigError
from weft.formatting import format_version
from weft.machine.hardware.calibration import Calibration
from weft.machine.hardware.cpu import KernelSpeed
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.kernel_shares import KernelShares, ProductShares, find_kernel_shares
from weft.machine.native.library import CPP_TYPES
from weft.plan.plan import Speculation
from weft.planner.question import Question

OURS = "weft"  # the engine that can be calibrated
# The error band of a calibrated engine is ERRORS times the fit's mean error, since other models differ more than the
# fitted ones, and at least MIN_ERROR.
ERRORS, MIN_ERROR = 2, 0.1


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """A figure and its source."""

    value: float
    source: str


MEASURED = "measured here, our kernels alone (weft bench calibrate measures the engine)"
MEASURED_ERROR = Constant(0.4, "docs/benchmarks.md: two models in three precisions on two cores of Zen 5")
# Precisions that a CPU's compiled kernels do not compute in; torch's take their place.
NOT_COMPILED = frozenset(precision for dtype, precision in OF_DTYPE.items() if dtype not in CPP_TYPES)
# Share of the speed at which SiLU alone goes through activations, for all PASSES of planner.roofline. Source: fit,
# first tokens of SmolLM2-135M after 64 to 1,024 tokens on two cores of Zen 5.
ROWS_SHARE = 0.6


class RankCurve(msgspec.Struct, frozen=True, array_like=True):
    """Figures for 1, 2, 4 and 8 ranks, and their source."""

    values: tuple[float, float, float, float]
    source: str

    def at(self, ranks: int) -> float:
        """Linear interpolation over log2 of the ranks; beyond 8 the figure for 8."""
        x = min(log2(ranks), 3.0)
        left = min(int(x), 2)
        return self.values[left] + (x - left) * (self.values[left + 1] - self.values[left])


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The engines, precisions and GPUs that a rule applies to; empty for all."""

    engine_names: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()

    def fits(self, precision: str, capability: tuple[int, int]) -> bool:
        """Return True for a precision and a capability as `known_capability` returns it."""
        wanted = not self.capabilities or capability in self.capabilities
        return wanted and (not self.precisions or precision in self.precisions)


class WeightsRule(_Rule, frozen=True, kw_only=True):
    """Streaming speed of a precision's weights: a share of 16-bit weights' speed, or of the bandwidth itself."""

    share: Constant
    of_bandwidth: bool = False


class MathRule(_Rule, frozen=True, kw_only=True):
    """The FLOPS that a precision's matrices are multiplied with, by name in `GpuSpec.flops`. `share` is relative to the
    share of the data sheet that 16-bit products reach."""

    flops: str
    share: float = 1.0


class KvRule(_Rule, frozen=True, kw_only=True):
    """The dtype of the KV cache for weights of a precision."""

    dtype: str
    source: str


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one engine; `planner/data/engines.toml` explains each of them.

    `measured` are the kernels of the GPUs on which the engine was calibrated. `speculation` is the speculative decoding
    that the user asked for.
    """

    name: str
    step_us: Constant
    sequence_us: Constant
    layer_us: Constant
    expert_layer_us: Constant
    matmul_scale: Constant
    attention_scale: Constant
    overlap: Constant
    experts_weights: Constant
    experts_matmul: Constant
    experts_matmul_fp4: Constant
    experts_matmul_unpacked: Constant
    hot_rank: Constant
    bubble: Constant
    stages_wait: Constant
    graphs: Constant
    utilization: Constant
    utilization_most: Constant
    utilization_of_free: Constant
    runtime_MiB: Constant
    graphs_MiB: Constant
    max_num_seqs: Constant
    max_num_batched_tokens: Constant
    small_GiB: Constant
    small_num_seqs: Constant
    small_num_batched_tokens: Constant
    hold_up_ms: Constant
    max_num_seqs_by_stage: Constant
    window_cache: Constant
    pipelined: Constant
    own_activations: Constant
    activations_dense: RankCurve
    activations_experts: RankCurve
    activations_least_MiB: Constant
    nccl_MiB: RankCurve
    error: Constant
    weights: tuple[WeightsRule, ...] = ()
    math: tuple[MathRule, ...] = ()
    kv: tuple[KvRule, ...] = ()
    measured: tuple[KernelShares, ...] = ()
    error_beyond: Constant | None = None  # for experts and precisions that the measured kernels say nothing about
    speculation: Speculation | None = None
    cpu: EngineProfile | None = None  # of the same engine on the CPU, if it is used with the GPUs

    def on(self, gpu: GpuSpec) -> EngineProfile:
        """The constants for a device: a CPU that is used with GPUs has its own."""
        return self.cpu if self.cpu is not None and gpu.kind == "cpu" else self

    def batch_limits(self, memory_bytes: int) -> tuple[int, int]:
        """(tokens of a step, sequences at once): the maxima on cards of `memory_bytes`, 0 for the smallest card."""
        tokens, sequences = self.max_num_batched_tokens.value, self.max_num_seqs.value
        if not memory_bytes or memory_bytes < self.small_GiB.value * (1 << 30):
            tokens = min(tokens, self.small_num_batched_tokens.value)
            sequences = min(sequences, self.small_num_seqs.value)
        return int(tokens), int(sequences)

    def held_precision(self, precision: str) -> str:
        """The precision in which the engine holds weights of `precision`.

        Only our own engine converts a GGUF file's blocks; others compute with them as they are.
        """
        return held_precision(precision) if self.name == OURS else precision

    def kernels(self, gpu: GpuSpec, precision: str) -> KernelShares:
        """The shares that kernels reach on a GPU: the measured ones, else the tables'."""
        for kernels in self.measured:
            if kernels.gpu == gpu.name and not (kernels.products and precision in NOT_COMPILED):
                return kernels
        return find_kernel_shares(gpu)

    def error_for(self, shape: ModelShape, precision: str) -> Constant:
        """The relative error of predictions. Measurements of a CPU's kernels say nothing about experts."""
        beyond = self.error_beyond if shape.experts or precision in NOT_COMPILED else None
        return beyond or self.error

    def kv_dtype(self, precision: str) -> str:
        """The engine's default dtype of the KV cache for weights of a precision."""
        return next((rule.dtype for rule in self.kv if rule.fits(precision, (0, 0))), "bf16")

    def provenance(self) -> dict[str, str]:
        """Every constant as "value: source"."""
        texts: dict[str, str] = {}
        for name in self.__struct_fields__:
            figure = getattr(self, name)
            if isinstance(figure, Constant):
                texts[name] = f"{figure.value:g}: {figure.source}"
            elif isinstance(figure, RankCurve):
                texts[name] = f"{', '.join(f'{value:g}' for value in figure.values)}: {figure.source}"
        for rule in self.weights:
            scope = " ".join([*rule.precisions, *map(format_version, rule.capabilities)]) or "any"
            texts[f"weights {scope}"] = f"{rule.share.value:g}: {rule.share.source}"
        for kernels in self.measured:
            texts |= _measured_provenance(kernels)
        return texts


def _measured_provenance(kernels: KernelShares) -> dict[str, str]:
    """The measured shares of one GPU as "value: source"."""
    shares = f"{kernels.weights:.2f} and {kernels.decode_attention:.2f} of the bandwidth"
    shares += f", {kernels.matmul:.2f} and {kernels.prefill_attention:.2f} of the FLOPS"
    texts = {f"kernels on {kernels.gpu}": f"{shares}: {kernels.source}"}
    for product in kernels.products:
        shares = f"{product.weights[0]:.2f} of the bandwidth, {product.matmul:.2f} of the FLOPS"
        texts[f"products of {product.bits} bits on {kernels.gpu}"] = f"{shares}: {product.source}"
    return texts


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("weft.planner") / "data/engines.toml").read_text())


def engine_names() -> tuple[str, ...]:
    """Names of all profiles."""
    return tuple(_data()["engine"])


def runs_on_cpu(engine: str) -> bool:
    """Return True if there are figures for an engine on a CPU."""
    return engine in _data()["cpu"]["engine"]


@cache
def load_profile(engine: str, on_cpu: bool = False) -> EngineProfile:
    """The profile of an engine on GPUs, or on a CPU. Raises ConfigError with the nearest name for an unknown engine."""
    data = _data()
    if engine not in data["engine"]:
        near = get_close_matches(engine, engine_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown engine {engine!r}; {hint}known: {', '.join(engine_names())}", code="unknown-engine")
    rules = {
        kind: [rule for rule in data[kind] if engine in rule.get("engines", [engine])]
        for kind in ("weights", "math", "kv")
    }
    constants = {**data["common"], **data["engine"][engine]}
    if on_cpu:
        constants |= data["cpu"]["common"] | data["cpu"]["engine"].get(engine, {})
        # Rules for streaming and multiplying weights are for GPUs.
        rules |= {"weights": [], "math": []}
    return msgspec.convert({"name": engine, **constants, **rules}, EngineProfile)


def calibrated(profile: EngineProfile, gpus: Sequence[GpuSpec]) -> EngineProfile:
    """Our engine's profile with the measurements of these GPUs in place of its own figures.

    The host's times are the slowest calibration's. Nothing changes if a GPU was not calibrated; a CPU that was not gets
    the measurements of its kernels alone.
    """
    if profile.name != OURS:
        return profile
    if gpus[0].calibration is None:
        return _with_kernels(profile, gpus)
    known = {gpu.name: (gpu, gpu.calibration) for gpu in gpus if gpu.calibration is not None}
    if any(gpu.name not in known for gpu in gpus):
        return profile
    slowest = max((one for _, one in known.values()), key=lambda one: one.step_us.value + one.layer_us.value)
    names = ("step_us", "sequence_us", "layer_us", "overlap", "runtime_MiB")
    figures = {name: Constant(getattr(slowest, name).value, slowest.source) for name in names}
    plain = Constant(1.0, f"{slowest.source}: kernels, unscaled")
    error = Constant(max(MIN_ERROR, ERRORS * slowest.error), f"{slowest.source}: {ERRORS} times the error of the fit")
    measured = tuple(_kernels(gpu, one) for gpu, one in known.values())
    profile = msgspec.structs.replace(
        profile, **figures, matmul_scale=plain, attention_scale=plain, error=error, measured=measured
    )
    return _with_measured_precisions(profile, slowest)


def _with_kernels(profile: EngineProfile, gpus: Sequence[GpuSpec]) -> EngineProfile:
    """The profile with the measured speed of our kernels alone, in place of shares of the hardware's peak."""
    known = {gpu.name: (gpu, gpu.kernels) for gpu in gpus if gpu.kernels is not None}
    if any(gpu.name not in known for gpu in gpus):
        return profile
    measured = tuple(_kernels_alone(gpu, speed) for gpu, speed in known.values())
    profile = msgspec.structs.replace(profile, measured=measured)
    if not all(speed.measured for _, speed in known.values()):
        return profile
    return msgspec.structs.replace(profile, error=MEASURED_ERROR, error_beyond=profile.error)


def _kernels_alone(gpu: GpuSpec, speed: KernelSpeed) -> KernelShares:
    """The rates of our kernels as shares of the planner's figures for this CPU."""
    flops, source = gpu.flops["bf16"], speed.source or MEASURED
    products = tuple(
        ProductShares(
            bits=product.bits,
            weights=tuple(rate / gpu.bandwidth_Bps for rate in product.weights_Bps),
            matmul=product.matmul_flops / flops,
            source=product.source or source,
        )
        for product in speed.products
    )
    plain = next(product for product in products if product.bits == 16)
    return KernelShares(
        gpu=gpu.name,
        weights=plain.weights[0],
        kernel_us=0.0,  # in the time of a layer
        matmul=plain.matmul,
        decode_attention=speed.cache_Bps / gpu.bandwidth_Bps,
        prefill_attention=speed.attention_flops / flops,
        source=source,
        products=products,
        rows=ROWS_SHARE * speed.rows_Bps / gpu.bandwidth_Bps,
    )


def _with_measured_precisions(profile: EngineProfile, calibration: Calibration) -> EngineProfile:
    """The profile with the precisions that were measured: their rules come before the tables' rules."""
    weights, math = [], []
    for precision, rates in calibration.quantised.items():
        share = Constant(rates.weights_Bps.value / calibration.weights_Bps.value, calibration.source)
        weights.append(WeightsRule(precisions=_multiplied_alike(precision), share=share))
        matmul = rates.matmul_flops.value / calibration.matmul_flops.value
        math.append(MathRule(precisions=_multiplied_alike(precision), flops="bf16", share=matmul))
    return msgspec.structs.replace(profile, weights=(*weights, *profile.weights), math=(*math, *profile.math))


def _multiplied_alike(precision: str) -> tuple[str, ...]:
    """A precision, with the GGUF mixes most of whose tensors are multiplied in the same way."""
    if precision not in MIXES:
        return (precision,)
    return tuple(mix for mix in MIXES if _products(mix) == _products(precision))


def _products(mix: str) -> tuple[int, bool]:
    """(bits, has minima) of most tensors of a mix. Minima make no difference with 8 bits."""
    scheme = SCHEMES[scheme_for_types([MIXES[mix]]) or ""]
    return scheme.bits, scheme.bits < 8 and scheme.lowest in ("minimum", "nested")


def _kernels(gpu: GpuSpec, calibration: Calibration) -> KernelShares:
    """The measured rates as shares of the planner's figures for this GPU."""
    flops = gpu.flops.get("bf16") or gpu.flops["fp16"]
    return KernelShares(
        gpu=gpu.name,
        weights=calibration.weights_Bps.value / gpu.bandwidth_Bps,
        kernel_us=0.0,  # in the time of a layer
        matmul=calibration.matmul_flops.value / flops,
        decode_attention=calibration.cache_Bps.value / gpu.bandwidth_Bps,
        prefill_attention=calibration.attention_flops.value / flops,
        source=calibration.source,
    )


def engine_profile(question: Question) -> EngineProfile:
    """The engine's constants, with the limits that the question gives in place of the engine's own."""
    cluster, given = question.cluster, {}
    profile = calibrated(load_profile(question.engine, on_cpu=cluster.on_cpu), cluster.gpus)
    if question.gpu_memory_utilization is not None:
        share = Constant(question.gpu_memory_utilization, "--gpu-memory-utilization")
        given = {"utilization": share, "utilization_most": share}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        most = getattr(question, name)
        if most is not None:
            given[name] = Constant(most, f"--{name.replace('_', '-')}")
            given[name.replace("max", "small", 1)] = given[name]  # on cards of any memory size
    if "max_num_batched_tokens" in given:
        given["hold_up_ms"] = Constant(0.0, "--max-num-batched-tokens")
    profile = msgspec.structs.replace(profile, speculation=question.speculation, **given)
    if cluster.cpu is None:
        return profile
    for_cpu = calibrated(load_profile(question.engine, on_cpu=True), [cluster.cpu])
    return msgspec.structs.replace(profile, cpu=msgspec.structs.replace(for_cpu, speculation=question.speculation))


def kv_cache_dtype(question: Question, precision: str) -> str:
    """The dtype of the KV cache: the question's, or the engine's own for weights of this precision."""
    return question.kv_dtype or engine_profile(question).kv_dtype(precision)
