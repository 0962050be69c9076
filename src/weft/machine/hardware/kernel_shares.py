"""Shares of a device's bandwidth and FLOPS that kernels reach, per GPU type, each with its source."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from weft.machine.hardware.gpus import GpuSpec


class ProductShares(msgspec.Struct, frozen=True):
    """Shares of matrix products with weights of `bits` bits: `weights` as in `KernelShares`, one for each number of
    tokens in hardware.cpu.TOKENS; `matmul` for the tokens beyond these."""

    bits: int
    weights: tuple[float, ...]
    matmul: float
    source: str


class KernelShares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares that kernels reach on GPUs whose name begins with `gpu`, or else that have one of these compute
    capabilities; with `cpu`, on any CPU, as shares of its measured speed.

    `weights` and `decode_attention` are shares of the memory bandwidth, `matmul` and `prefill_attention` of the dense
    FLOPS; `kernel_us` is the time of a matrix product beyond the bytes that it streams. `products` give shares per
    number of bits, if known. `rows` is the share of the bandwidth for activations in the operations between products.
    """

    weights: float
    kernel_us: float
    matmul: float
    decode_attention: float
    prefill_attention: float
    source: str
    fp8_weights: float | None = None
    cpu: bool = False
    gpu: str = ""
    capabilities: tuple[tuple[int, int], ...] = ()
    products: tuple[ProductShares, ...] = ()
    rows: float = 0.8


@cache
def kernel_share_entries() -> tuple[KernelShares, ...]:
    """All entries of data/kernels.toml, the general one last."""
    text = (files("weft.machine.hardware") / "data/kernels.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["kernel"], tuple[KernelShares, ...])


@cache
def known_capability(gpu: GpuSpec) -> tuple[int, int]:
    """Return the capability by which tables are read for a GPU: the nearest capability in data/kernels.toml of the
    GPU's major generation.

    A generation that the tables do not have, and AMD's GPUs, whose numbers mean something else, keep their own.
    """
    major, minor = gpu.capability
    known = [each for entry in kernel_share_entries() for each in entry.capabilities if each[0] == major]
    if gpu.gfx or not known:
        return gpu.capability
    return min(known, key=lambda each: abs(each[1] - minor))


@cache
def find_kernel_shares(gpu: GpuSpec) -> KernelShares:
    """Find the entry by the GPU's name, else by its capability (NVIDIA's), else the general one; a CPU has its own."""
    entries = kernel_share_entries()
    if gpu.kind == "cpu":
        return next(entry for entry in entries if entry.cpu)
    return max(entries, key=lambda entry: _match(entry, gpu))


def _match(entry: KernelShares, gpu: GpuSpec) -> int:
    """Closeness of an entry to a GPU; the first of the closest entries counts."""
    if entry.gpu and gpu.name.startswith(entry.gpu):
        return 3
    if known_capability(gpu) in entry.capabilities and not gpu.gfx:
        return 2
    return 1 if entry is kernel_share_entries()[-1] else 0
