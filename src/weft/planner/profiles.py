"""Profiles: what each engine adds to the arithmetic, every constant with where it is from."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

import msgspec

from weft.architectures.shape import ModelShape
from weft.errors import ConfigError
from weft.formats.gguf_types import MIXES
from weft.formats.precision import OF_DTYPE, as_held
from weft.formats.schemes import SCHEMES, held_as
from weft.hardware.calibration import Calibration
from weft.hardware.cpu import KernelSpeed
from weft.hardware.gpus import GpuSpec
from weft.hardware.kernel_shares import Kernels, Products, kernels_of
from weft.native.library import CPP_TYPES
from weft.plan.plan import Speculation

OURS = "weft"  # the engine that can be calibrated
# Of a calibration's mean error: models are less alike than those that it was fitted on.
ERRORS, LEAST_ERROR = 2, 0.1


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """A figure, and its provenance."""

    value: float
    source: str


MEASURED = "measured here, our kernels alone (weft bench calibrate measures the engine)"
MEASURED_ERROR = Constant(0.4, "docs/benchmarks.md: two models in three precisions on two cores of Zen 5")
# Precisions that a CPU's compiled kernels do not compute in; torch's take their place.
NOT_COMPILED = frozenset(precision for dtype, precision in OF_DTYPE.items() if dtype not in CPP_TYPES)
# Of the speed at which SiLU alone goes through activations, for all PASSES of planner.roofline. Source: fit, first
# tokens of SmolLM2-135M after 64 to 1,024 tokens on two cores of Zen 5.
ROWS_SHARE = 0.6


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Figures for 1, 2, 4 and 8 ranks, and their provenance."""

    values: tuple[float, float, float, float]
    source: str

    def at(self, ranks: int) -> float:
        """In a straight line over log2 of the ranks, beyond 8 as at 8."""
        x = min(log2(ranks), 3.0)
        left = min(int(x), 2)
        return self.values[left] + (x - left) * (self.values[left + 1] - self.values[left])


class _For(msgspec.Struct, frozen=True, kw_only=True):
    """Which engines, precisions and GPUs a rule is for; empty is all."""

    engines: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None

    def fits(self, precision: str, capability: tuple[int, int]) -> bool:
        return (not self.precisions or precision in self.precisions) and self.capability in (None, capability)


class WeightsRule(_For, frozen=True, kw_only=True):
    """How fast a precision's weights stream: a share of what 16-bit ones reach, or of the bandwidth itself."""

    share: Constant
    of_bandwidth: bool = False


class MathRule(_For, frozen=True, kw_only=True):
    """The FLOPS that a precision's matrices are multiplied with, by their name in `GpuSpec.flops`; of them this share
    of what those of 16 bits reach."""

    flops: str
    share: float = 1.0


class KvRule(_For, frozen=True, kw_only=True):
    """The dtype of the KV cache beside weights of a precision."""

    dtype: str
    source: str


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one engine; `planner/data/engines.toml` says what each is. `measured` are the kernels of GPUs on
    which it was calibrated, `speculation` is how the user has it guess ahead."""

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
    activations_dense: Row
    activations_experts: Row
    activations_least_MiB: Constant
    nccl_MiB: Row
    error: Constant
    weights: tuple[WeightsRule, ...] = ()
    math: tuple[MathRule, ...] = ()
    kv: tuple[KvRule, ...] = ()
    measured: tuple[Kernels, ...] = ()
    error_beyond: Constant | None = None  # where the kernels that were measured alone tell nothing
    speculation: Speculation | None = None

    def batch(self, memory_bytes: int) -> tuple[int, int]:
        """The most tokens of a step, and the most sequences that run at once, on cards of so much memory; 0 is the
        smallest."""
        tokens, sequences = self.max_num_batched_tokens.value, self.max_num_seqs.value
        if not memory_bytes or memory_bytes < self.small_GiB.value * (1 << 30):
            tokens = min(tokens, self.small_num_batched_tokens.value)
            sequences = min(sequences, self.small_num_seqs.value)
        return int(tokens), int(sequences)

    def held(self, precision: str) -> str:
        """What the engine holds of weights in a precision: others compute with a GGUF file's blocks as they are."""
        return as_held(precision) if self.name == OURS else precision

    def kernels(self, gpu: GpuSpec, precision: str) -> Kernels:
        """What kernels reach on a GPU: as measured, else as the tables say."""
        known = (it for it in self.measured if not (it.products and precision in NOT_COMPILED))
        return next((it for it in known if it.gpu == gpu.name), None) or kernels_of(gpu)

    def error_of(self, shape: ModelShape, precision: str) -> Constant:
        """How far predictions may be off: what was measured of a CPU's kernels tells nothing of experts."""
        beyond = self.error_beyond if shape.experts or precision in NOT_COMPILED else None
        return beyond or self.error

    def kv_dtype(self, precision: str) -> str:
        """What the engine keeps keys and values in, unless it is told."""
        return next((rule.dtype for rule in self.kv if rule.fits(precision, (0, 0))), "bf16")

    def provenance(self) -> dict[str, str]:
        """Every constant as "value: source"."""
        found: dict[str, str] = {}
        for name in self.__struct_fields__:
            it = getattr(self, name)
            if isinstance(it, Constant):
                found[name] = f"{it.value:g}: {it.source}"
            elif isinstance(it, Row):
                found[name] = f"{', '.join(f'{value:g}' for value in it.values)}: {it.source}"
        for rule in self.weights:
            where = [*rule.precisions, *(".".join(map(str, rule.capability or ())).split())]
            found["weights " + " ".join(where or ["any"])] = f"{rule.share.value:g}: {rule.share.source}"
        for it in self.measured:
            shares = f"{it.weights:.2f} and {it.decode_attention:.2f} of the bandwidth"
            shares += f", {it.matmul:.2f} and {it.prefill_attention:.2f} of the FLOPS"
            found[f"kernels on {it.gpu}"] = f"{shares}: {it.source}"
            for each in it.products:
                shares = f"{each.weights[0]:.2f} of the bandwidth, {each.matmul:.2f} of the FLOPS"
                found[f"products of {each.bits} bits on {it.gpu}"] = f"{shares}: {each.source}"
        return found


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("weft.planner") / "data/engines.toml").read_text())


def engines() -> tuple[str, ...]:
    """Names of all profiles."""
    return tuple(_data()["engine"])


def runs_on_cpu(engine: str) -> bool:
    """Whether there are figures of an engine on a CPU."""
    return engine in _data()["cpu"]["engine"]


@cache
def profile(engine: str, on_cpu: bool = False) -> Profile:
    """The profile of an engine on GPUs, or on a CPU. Raises ConfigError with the nearest name for one that there is
    none of."""
    data = _data()
    if engine not in data["engine"]:
        near = get_close_matches(engine, engines(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown engine {engine!r}; {hint}known: {', '.join(engines())}")
    rules = {
        kind: [rule for rule in data[kind] if engine in rule.get("engines", [engine])]
        for kind in ("weights", "math", "kv")
    }
    constants = {**data["common"], **data["engine"][engine]}
    if on_cpu:
        constants |= data["cpu"]["common"] | data["cpu"]["engine"].get(engine, {})
        # How weights stream, and in what they are multiplied, is told of GPUs.
        rules |= {"weights": [], "math": []}
    return msgspec.convert({"name": engine, **constants, **rules}, Profile)


def calibrated(found: Profile, gpus: Sequence[GpuSpec]) -> Profile:
    """Our engine's profile with what was measured on these GPUs in the place of its own figures. What the host takes
    is that of the slowest; nothing changes where a GPU of them was not measured. Of a CPU that was not it is what is
    known of the kernels alone."""
    if found.name != OURS:
        return found
    if gpus[0].calibration is None:
        return _with_kernels(found, gpus)
    known = {gpu.name: (gpu, gpu.calibration) for gpu in gpus if gpu.calibration is not None}
    if any(gpu.name not in known for gpu in gpus):
        return found
    slowest = max((it for _, it in known.values()), key=lambda it: it.step_us.value + it.layer_us.value)
    names = ("step_us", "sequence_us", "layer_us", "overlap", "runtime_MiB")
    figures = {name: Constant(getattr(slowest, name).value, slowest.source) for name in names}
    plain = Constant(1.0, f"{slowest.source}: as the kernels are")
    error = Constant(max(LEAST_ERROR, ERRORS * slowest.error), f"{slowest.source}: {ERRORS} times the fit's")
    measured = tuple(_kernels(gpu, it) for gpu, it in known.values())
    found = msgspec.structs.replace(
        found, **figures, matmul_scale=plain, attention_scale=plain, error=error, measured=measured
    )
    return _quantised(found, slowest)


def _with_kernels(found: Profile, gpus: Sequence[GpuSpec]) -> Profile:
    """With what our kernels reach alone, in the place of shares of what the hardware could."""
    known = {gpu.name: (gpu, gpu.kernels) for gpu in gpus if gpu.kernels is not None}
    if any(gpu.name not in known for gpu in gpus):
        return found
    found = msgspec.structs.replace(found, measured=tuple(_alone(gpu, it) for gpu, it in known.values()))
    if not all(it.measured for _, it in known.values()):
        return found
    return msgspec.structs.replace(found, error=MEASURED_ERROR, error_beyond=found.error)


def _alone(gpu: GpuSpec, it: KernelSpeed) -> Kernels:
    """Their rates as shares of what the planner takes for this CPU's own."""
    flops, source = gpu.flops["bf16"], it.source or MEASURED
    products = tuple(
        Products(
            bits=each.bits,
            weights=tuple(rate / gpu.bandwidth_Bps for rate in each.weights_Bps),
            matmul=each.matmul_flops / flops,
            source=each.source or source,
        )
        for each in it.products
    )
    plain = next(each for each in products if each.bits == 16)
    return Kernels(
        gpu=gpu.name,
        weights=plain.weights[0],
        kernel_us=0.0,  # in the time of a layer
        matmul=plain.matmul,
        decode_attention=it.cache_Bps / gpu.bandwidth_Bps,
        prefill_attention=it.attention_flops / flops,
        source=source,
        products=products,
        rows=ROWS_SHARE * it.rows_Bps / gpu.bandwidth_Bps,
    )


def _quantised(found: Profile, it: Calibration) -> Profile:
    """With the precisions that were measured: theirs come before the tables' rules."""
    weights = tuple(
        WeightsRule(
            precisions=_alike(precision),
            share=Constant(rates.weights_Bps.value / it.weights_Bps.value, it.source),
        )
        for precision, rates in it.quantised.items()
    )
    math = tuple(
        MathRule(precisions=_alike(precision), flops="bf16", share=rates.matmul_flops.value / it.matmul_flops.value)
        for precision, rates in it.quantised.items()
    )
    return msgspec.structs.replace(found, weights=(*weights, *found.weights), math=(*math, *found.math))


def _alike(precision: str) -> tuple[str, ...]:
    """A precision, and those of GGUF's mixes of which most is multiplied as most of it is."""
    if precision not in MIXES:
        return (precision,)
    return tuple(mix for mix in MIXES if _products(mix) == _products(precision))


def _products(mix: str) -> tuple[int, bool]:
    """Of most tensors of a mix: their bits, and whether they have minima, which make no difference beside 8 bits."""
    scheme = SCHEMES[held_as([MIXES[mix]]) or ""]
    return scheme.bits, scheme.bits < 8 and scheme.lowest == "minimum"


def _kernels(gpu: GpuSpec, it: Calibration) -> Kernels:
    """The measured rates as shares of what the planner takes for this GPU's own."""
    flops = gpu.flops.get("bf16") or gpu.flops["fp16"]
    return Kernels(
        gpu=gpu.name,
        weights=it.weights_Bps.value / gpu.bandwidth_Bps,
        kernel_us=0.0,  # in the time of a layer
        matmul=it.matmul_flops.value / flops,
        decode_attention=it.cache_Bps.value / gpu.bandwidth_Bps,
        prefill_attention=it.attention_flops.value / flops,
        source=it.source,
    )
