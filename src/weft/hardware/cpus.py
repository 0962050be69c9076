"""CPUs: what our own kernels can be expected to reach before they are built, by a CPU's instruction set."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from itertools import accumulate

import msgspec

from weft.formats.schemes import SCHEMES, Scheme
from weft.hardware.cpu import TOKENS, CpuSpeed, KernelSpeed, ProductSpeed

# How weights are held whose products stand for all of as many bits: 16 as they are, 8 and 4.
HELD: tuple[Scheme | None, ...] = (None, SCHEMES["Q8_0"], SCHEMES["Q4_1"])
DISTURBED = "measured here while others computed: it may be faster (weft hardware --refresh-hardware)"
CACHE_SHARE = 0.8  # of the bandwidth, at which decode reads keys and values where it computes fast enough; as below


class _Product(msgspec.Struct, frozen=True, kw_only=True):
    """As data/cpus.toml says."""

    bits: int
    few: tuple[float, ...]
    many: float


class _Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """As data/cpus.toml says."""

    features: frozenset[str]
    products: tuple[_Product, ...]
    cache: float
    attention: float
    rows: float
    source: str


@cache
def _table() -> tuple[_Cpu, ...]:
    text = (files("weft.hardware") / "data/cpus.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["cpu"], tuple[_Cpu, ...])


def bytes_of(scheme: Scheme | None) -> float:
    """What a weight takes, with its part of what its group has."""
    return 2.0 if scheme is None else (scheme.bits + scheme.group_bits / scheme.group) / 8


def cpu_kernel_speed(features: Collection[str], speed: CpuSpeed) -> KernelSpeed | None:
    """What our kernels reach on a CPU with these features: as measured, and as on others what was not. None where they
    cannot be built or do not run, and others take their place."""
    if not speed.runs_own:
        return None
    expected = expected_kernel_speed(features, speed)
    if speed.kernels is None:
        return expected
    measured = {it.bits for it in speed.kernels.products}
    others = [it for it in expected.products if it.bits not in measured]
    priors = (msgspec.structs.replace(it, source=expected.source) for it in others)
    products = (*speed.kernels.products, *priors)
    source = DISTURBED if speed.busy else ""
    return msgspec.structs.replace(speed.kernels, products=products, source=source, measured=not speed.busy)


def expected_kernel_speed(features: Collection[str], speed: CpuSpeed) -> KernelSpeed:
    """What the kernels reach on a CPU with these features, of which numpy's speed is known: weights stream as fast as
    the memory is read, unless they are multiplied slower than that."""
    found = next(entry for entry in _table() if entry.features <= set(features))
    sizes = {32: 4.0} | {scheme.bits if scheme else 16: bytes_of(scheme) for scheme in HELD}

    def streaming(it: _Product) -> tuple[float, ...]:
        # More tokens never take less.
        flops = speed.fp32_flops
        times = (2 * tokens / (few * flops) for tokens, few in zip(TOKENS, it.few, strict=True))
        return tuple(min(speed.bandwidth_Bps, sizes[it.bits] / time) for time in accumulate(times, max))

    products = tuple(
        ProductSpeed(bits=it.bits, weights_Bps=streaming(it), matmul_flops=it.many * speed.fp32_flops)
        for it in found.products
    )
    return KernelSpeed(
        products=products,
        cache_Bps=min(CACHE_SHARE * speed.bandwidth_Bps, found.cache * speed.fp32_flops),
        attention_flops=found.attention * speed.fp32_flops,
        rows_Bps=found.rows * speed.fp32_flops,
        source=f"a prior, until it is measured here: {found.source} on Zen 5, for numpy's speed here",
    )
