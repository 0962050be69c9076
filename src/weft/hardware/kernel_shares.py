"""Kernels: the share of a GPU's data sheet that matrix products and attention reach, with where it is from."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from weft.hardware.gpus import GpuSpec


class ProductShares(msgspec.Struct, frozen=True):
    """Of matrix products with weights of so many bits: `weights` as in `Kernels`, with so many tokens as
    hardware.cpu.TOKENS says, and `matmul` of each token beyond."""

    bits: int
    weights: tuple[float, ...]
    matmul: float
    source: str


class KernelShares(msgspec.Struct, frozen=True, kw_only=True):
    """What kernels reach on the GPUs whose name begins with `gpu`, or else have this compute capability; with `cpu`, on
    any CPU, of what was measured on it.

    `weights` and `decode_attention` are shares of the memory bandwidth, `matmul` and `prefill_attention` of the
    dense FLOPS; `kernel_us` is what a matrix product takes beyond the bytes that it streams. `products`, where there
    are any, tell more of those by the bits that a weight has; `rows` is the share of the bandwidth at which activations
    go through what is computed between products.
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
    capability: tuple[int, int] | None = None
    products: tuple[ProductShares, ...] = ()
    rows: float = 0.8


@cache
def kernel_share_entries() -> tuple[KernelShares, ...]:
    """Every entry, the general one last."""
    text = (files("weft.hardware") / "data/kernels.toml").read_text()
    return msgspec.convert(tomllib.loads(text)["kernel"], tuple[KernelShares, ...])


@cache
def find_kernel_shares(gpu: GpuSpec) -> KernelShares:
    """By the GPU's name, else by its capability (NVIDIA's), else the general entry; a CPU has its own."""
    if gpu.kind == "cpu":
        return next(entry for entry in kernel_share_entries() if entry.cpu)
    named = [entry for entry in kernel_share_entries() if entry.gpu and gpu.name.startswith(entry.gpu)]
    alike = [entry for entry in kernel_share_entries() if entry.capability == gpu.capability and not gpu.gfx]
    return [*named, *alike, kernel_share_entries()[-1]][0]
