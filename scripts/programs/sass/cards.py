"""Limits of a multiprocessor by compute capability, and cards for which shares of issue slots are stated, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.machine.hardware.gpus import HALF_RATE, TENSOR_FLOPS, GpuSpec, find_gpu

WARP = 32  # threads
ISSUED = 4  # warp instructions that a multiprocessor issues in a cycle, one by each of its schedulers
REGISTERS = 65536  # of a multiprocessor; a warp is given them in multiples of REGISTER_UNIT
REGISTER_UNIT = 256
WARP_UNIT = 4  # registers suffice for so many warps at once: one for each scheduler
SHARED_UNIT = 128  # bytes
SHARED_RESERVED = 1 << 10  # bytes that the system takes for each program


@dataclass(frozen=True)
class Limits:
    """The most warps, programs and bytes of shared memory that a multiprocessor holds at a time."""

    warps: int
    programs: int
    shared_bytes: int

    def programs_of(self, warps: int, registers: int, shared_bytes: int) -> int:
        """Number of programs that run on a multiprocessor at a time, each of `warps` warps with `registers` registers
        a thread and `shared_bytes` of shared memory."""
        each_warp = rounded_up(registers * WARP, REGISTER_UNIT)
        by_registers = REGISTERS // each_warp // WARP_UNIT * WARP_UNIT // warps
        by_shared = self.shared_bytes // rounded_up(shared_bytes + SHARED_RESERVED, SHARED_UNIT)
        return min(self.programs, self.warps // warps, by_registers, by_shared)


# NVIDIA, CUDA Programming Guide, 5.1 "Compute Capabilities", the tables of technical specifications.
LIMITS = {
    75: Limits(warps=32, programs=16, shared_bytes=64 << 10),
    80: Limits(warps=64, programs=32, shared_bytes=164 << 10),
    86: Limits(warps=48, programs=16, shared_bytes=100 << 10),
    89: Limits(warps=48, programs=24, shared_bytes=100 << 10),
    90: Limits(warps=64, programs=32, shared_bytes=228 << 10),
    100: Limits(warps=64, programs=32, shared_bytes=228 << 10),
    120: Limits(warps=48, programs=24, shared_bytes=100 << 10),
}


@dataclass(frozen=True)
class Card:
    """`processors` multiprocessors at `clock_Hz`; bandwidth and architecture are those of the catalogue of GPUs."""

    name: str
    processors: int
    clock_Hz: float
    source: str

    @cached_property
    def spec(self) -> GpuSpec:
        return find_gpu(self.name)

    @property
    def architecture(self) -> int:
        major, minor = self.spec.capability
        return 10 * major + minor

    def share(self, instructions: int, warps: int, bytes_moved: float, flops: float) -> float:
        """Share of the issue slots that passes take while the memory, or the tensor cores, work at their full rate.

        A pass issues `instructions` for each of `warps`. In the same cycles its multiprocessor's part of the bandwidth
        has to move `bytes_moved`; a pass without bytes is set against `flops` in 16 bits. Above 1 the instructions take
        longer than the memory: the full rate cannot be reached.
        """
        if bytes_moved:
            cycles = bytes_moved / (self.spec.bandwidth_Bps / self.processors / self.clock_Hz)
        else:
            cycles = flops / self.flops_per_cycle
        return instructions * warps / ISSUED / cycles

    @property
    def flops_per_cycle(self) -> int:
        """Dense operations of one multiprocessor's tensor cores in 16 bits; half for GeForce cards that sum so."""
        each = TENSOR_FLOPS[self.spec.capability]
        return each // 2 if self.name.startswith("RTX") and self.spec.capability in HALF_RATE else each


CARDS = (
    Card("T4", 40, 1.59e9, "NVIDIA Turing GPU Architecture: boost clock"),
    Card("A100-80GB-SXM", 108, 1.41e9, "NVIDIA A100 Tensor Core GPU Architecture: boost clock"),
    Card("RTX 3090", 82, 1.695e9, "NVIDIA Ampere GA102 GPU Architecture: boost clock"),
    Card("RTX 4090", 128, 2.52e9, "NVIDIA Ada GPU Architecture: boost clock"),
    Card("H200-SXM", 132, 1.98e9, "nvidia-smi: the greatest clock of multiprocessors"),
    Card("B200-SXM", 148, 1.86e9, "the clock at which 148 multiprocessors have the FLOPS of its data sheet"),
    Card("RTX 5090", 170, 2.407e9, "NVIDIA RTX Blackwell GPU Architecture: boost clock"),
)


def rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
