"""Expected speeds of Weft's own kernels on a CPU before they are built and measured, by its instruction set."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from itertools import accumulate

import msgspec

from weft.checkpoint.quantised.schemes import SCHEMES, Scheme
from weft.machine.hardware.cpu import TOKENS, CpuSpeed, KernelSpeed, ProductSpeed
from weft.machine.hardware.gpus import GpuSpec

# Schemes whose products stand for all schemes with as many bits: 16 (no scheme), 8 and 4.
HELD: tuple[Scheme | None, ...] = (None, SCHEMES["Q8_0"], SCHEMES["Q4_1"])
DISTURBED = "measured here while others computed: it may be faster (weft hardware --refresh-hardware)"
CACHE_SHARE = 0.8  # share of the bandwidth: decode reads keys and values at this rate if computing keeps up


class _ProductPrior(msgspec.Struct, frozen=True, kw_only=True):
    """A product in data/cpus.toml: operations for each of numpy's, with few tokens (TOKENS) and with many."""

    bits: int
    few: tuple[float, ...]
    many: float


class _CpuPrior(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of data/cpus.toml, for CPUs that have all `features`."""

    features: frozenset[str]
    products: tuple[_ProductPrior, ...]
    cache: float
    attention: float
    rows: float
    source: str


# The CPU of a host whose GPUs are described and whose CPU is not: eight channels of DDR4-3200, which reach three
# quarters of their 205 GB/s, and 32 cores with AVX2 at 2.5 GHz. In 32 bits they reach half
# of their 2.6 TFLOPS. Estimates.
TYPICAL = CpuSpeed(bandwidth_Bps=150e9, fp32_flops=1.3e12)
TYPICAL_FEATURES = ("avx2", "fma")
TYPICAL_BYTES = 256 << 30


def typical_cpu() -> GpuSpec:
    """The CPU of a host that was not described: an estimate for a server of 2021."""
    return GpuSpec(
        kind="cpu",
        name="a typical CPU",
        memory_bytes=TYPICAL_BYTES,
        bandwidth_Bps=TYPICAL.bandwidth_Bps,
        flops=dict.fromkeys(("fp32", "bf16", "fp16"), TYPICAL.fp32_flops),
        nvlink_Bps=0.0,
        pcie_Bps=0.0,
        capability=(0, 0),
        per_node=1,
        source="an estimate: eight channels of DDR4-3200, 32 cores with AVX2",
        kernels=expected_kernel_speed(TYPICAL_FEATURES, TYPICAL),
    )


@cache
def _cpu_priors() -> tuple[_CpuPrior, ...]:
    text = (files("weft.machine.hardware") / "data/cpus.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["cpu"], tuple[_CpuPrior, ...])


def bytes_of(scheme: Scheme | None) -> float:
    """Bytes of one weight, including its part of its group's scale and minimum."""
    return 2.0 if scheme is None else (scheme.bits + scheme.group_bits / scheme.group) / 8


def cpu_kernel_speed(features: Collection[str], speed: CpuSpeed) -> KernelSpeed | None:
    """Speed of Weft's kernels on a CPU with these features: measured figures, and expected ones for what was not
    measured. None if the kernels cannot be built or do not run, so that other code takes their place."""
    if not speed.runs_own:
        return None
    expected = expected_kernel_speed(features, speed)
    if speed.kernels is None:
        return expected
    measured = {product.bits for product in speed.kernels.products}
    unmeasured = [product for product in expected.products if product.bits not in measured]
    priors = (msgspec.structs.replace(product, source=expected.source) for product in unmeasured)
    products = (*speed.kernels.products, *priors)
    source = DISTURBED if speed.busy else ""
    return msgspec.structs.replace(speed.kernels, products=products, source=source, measured=not speed.busy)


def expected_kernel_speed(features: Collection[str], speed: CpuSpeed) -> KernelSpeed:
    """Expected speed of Weft's kernels on a CPU with these features, from numpy's measured speed.

    Weights stream at the memory's bandwidth, unless multiplying them is slower.
    """
    prior = next(entry for entry in _cpu_priors() if entry.features <= set(features))
    weight_bytes = {32: 4.0} | {scheme.bits if scheme else 16: bytes_of(scheme) for scheme in HELD}

    def streaming(product: _ProductPrior) -> tuple[float, ...]:
        flops = speed.fp32_flops
        times = (2 * tokens / (few * flops) for tokens, few in zip(TOKENS, product.few, strict=True))
        # More tokens never take less time.
        slowest = accumulate(times, max)
        return tuple(min(speed.bandwidth_Bps, weight_bytes[product.bits] / time) for time in slowest)

    products = tuple(
        ProductSpeed(bits=product.bits, weights_Bps=streaming(product), matmul_flops=product.many * speed.fp32_flops)
        for product in prior.products
    )
    return KernelSpeed(
        products=products,
        cache_Bps=min(CACHE_SHARE * speed.bandwidth_Bps, prior.cache * speed.fp32_flops),
        attention_flops=prior.attention * speed.fp32_flops,
        rows_Bps=prior.rows * speed.fp32_flops,
        source=f"a prior, until it is measured here: {prior.source} on Zen 5, for numpy's speed here",
    )
