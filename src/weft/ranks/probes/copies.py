"""Copies within a GPU, from and to the host and between two GPUs: their speed, and a check that all bytes arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from weft.study.measure.links import GpuResult, PairResult

MAX_COPY_BYTES = 256 << 20  # bytes of one copy: large enough that the time of its launch does not count
SHARE = 8  # one copy takes at most 1 / SHARE of a GPU's free memory
REPEATS = 8  # the fastest counts
STRIDE = 2  # a strided copy writes one byte of this many

Copy = Callable[[torch.Tensor, torch.device], torch.Tensor]


def check_devices(wanted: int) -> None:
    """Raise RuntimeError if torch sees fewer GPUs than the driver reports."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < wanted:
        raise RuntimeError(f"torch {torch.__version__} sees {count} GPUs, but the driver reports {wanted}")


def measure_gpu(index: int) -> GpuResult:
    """Measure copies within one GPU, and to and from pinned memory of the host."""
    device = torch.device("cuda", index)
    source, target = (torch.empty(copy_bytes(device), dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    return GpuResult(
        index=index,
        copy_Bps=2 * copy_rate(source, lambda: target.copy_(source)),
        from_host_Bps=copy_rate(source, lambda: target.copy_(host, non_blocking=True)),
        to_host_Bps=copy_rate(source, lambda: host.copy_(source, non_blocking=True)),
    )


def measure_pair(first: int, second: int) -> PairResult:
    """Measure two GPUs in both directions: the bytes of each copy are compared on the host, then copies are timed."""
    one, other = torch.device("cuda", first), torch.device("cuda", second)
    peer = torch.cuda.can_device_access_peer(first, second) and torch.cuda.can_device_access_peer(second, first)
    speeds, nbytes = [], min(copy_bytes(one), copy_bytes(other))
    for source, target in ((one, other), (other, one)):
        generator = torch.Generator(source).manual_seed(first * 1000 + second)
        sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=source, generator=generator)
        for name, copy in COPIES.items():
            wrong = wrong_bytes(sent, target, copy)
            if wrong:
                detail = f"{wrong:,} of {nbytes:,} bytes of a {name} copy from {source} to {target} arrived wrong"
                return PairResult(first=first, second=second, peer=peer, Bps=0.0, detail=detail)
        arrived = torch.empty(nbytes, dtype=torch.uint8, device=target)
        speeds.append(copy_rate(sent, partial(arrived.copy_, sent)))
    return PairResult(first=first, second=second, peer=peer, Bps=min(speeds), detail="")


def whole_copy(sent: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy as one run of bytes, by the copy engine."""
    return torch.zeros_like(sent, device=target).copy_(sent)


def strided_copy(sent: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy by a kernel on one GPU that writes every other byte of the other's memory, as sums through peer memory
    do."""
    wide = torch.zeros(STRIDE * sent.numel(), dtype=sent.dtype, device=target)
    wide[::STRIDE].copy_(sent)
    # Bytes that were not written must still be zero.
    return wide[::STRIDE] + wide[1::STRIDE]


COPIES: dict[str, Copy] = {"whole": whole_copy, "strided": strided_copy}


def wrong_bytes(sent: torch.Tensor, target: torch.device, copy: Copy) -> int:
    """Number of bytes that arrive wrong, counted on the host, because no path between the GPUs is trusted."""
    truth, arrived = sent.cpu(), copy(sent, target)
    synchronise(sent.device, arrived.device)
    return int((arrived.cpu() != truth).sum())


def copy_rate(sent: torch.Tensor, copy: Callable[[], object]) -> float:
    """Bytes per second of `copy`, timed on the stream of the GPU that `sent` is on."""
    with torch.cuda.device(sent.device):
        copy()
        synchronise(sent.device)
        fastest = float("inf")
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            copy()
            end.record()
            end.synchronize()
            fastest = min(fastest, begin.elapsed_time(end))
    return sent.numel() * 1000 / fastest  # of milliseconds


def synchronise(*devices: torch.device) -> None:
    """Wait for all work of the GPUs among the devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def copy_bytes(device: torch.device) -> int:
    """Size of one copy in bytes, from the device's free memory."""
    return min(MAX_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // SHARE)
