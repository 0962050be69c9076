"""Host copies of a GPU's tensors, whose device memory is freed while the copies exist."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from weft.formatting import format_bytes
from weft.logs import event_fields
from weft.machine.hardware import host
from weft.ranks.kernels.capture import release_pinned_memory, synchronize_device

logger = logging.getLogger("weft")

# Bytes of the host's memory that are allocated at once. A power of two, to which torch would round pinned memory up.
SLAB_BYTES = 256 << 20
SPARE_BYTES = 1 << 30  # of the host's memory, left to others: pinned memory cannot be swapped out


class HostCopies:
    """Copies of the memory behind tensors of one GPU, which `save` frees. The tensors are of no use until `restore`.

    The host's memory is pinned, so that copies run at the speed of the link and the host does not wait for them. It
    stays allocated for the next `save`: to pin memory takes longer than to copy it. NVIDIA's driver pins pages itself
    (https://github.com/NVIDIA/open-gpu-kernel-modules, kernel-open/nvidia/os-mlock.c), so RLIMIT_MEMLOCK does not
    count; the memory of the host and of the control group does. Under WSL 2 the driver pins less than all of it.

    `ranks` of the host save at once, about as much each: all of that is to fit the memory that is free.

    Views keep sharing their memory, but it comes back at other addresses.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._slabs: list[torch.Tensor] = []  # of SLAB_BYTES, the last one may be shorter
        # One tensor of each storage, with the storage's bytes; empty if nothing is saved.
        self._saved: list[tuple[torch.Tensor, int]] = []
        self._pins = True

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the memory behind `tensors` to the host, and free it."""
        by_storage = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._saved = [(tensor, tensor.untyped_storage().nbytes()) for tensor in by_storage.values()]
        self._allocate(sum(size for _, size in self._saved))
        for tensor, places in self._places():
            for place, part in zip(places, storage_bytes(tensor).split(list(map(len, places))), strict=True):
                place.copy_(part, non_blocking=True)
        if self._saved:
            synchronize_device(self._saved[0][0].device)
        for tensor, _ in self._saved:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the tensors' memory again, and begin to copy the values back; later kernels find them there."""
        for tensor, places in self._places():
            # The earlier copies are under way at the same time.
            tensor.untyped_storage().resize_(sum(map(len, places)))
            for place, part in zip(places, storage_bytes(tensor).split(list(map(len, places))), strict=True):
                part.copy_(place, non_blocking=True)
        self._saved = []

    def forget(self) -> None:
        """Drop what is saved, and give the host's memory back."""
        if self._slabs:
            self._saved, self._slabs, self._pins = [], [], True
            release_pinned_memory()

    def _places(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The tensors that are saved, each with the parts of slabs that hold its storage, in order."""
        position = 0
        for tensor, size in self._saved:
            places, end = [], position + size
            while position < end:
                slab, start = divmod(position, SLAB_BYTES)
                places.append(self._slabs[slab][start : start + end - position])
                position += len(places[-1])
            yield tensor, places

    def _allocate(self, total: int) -> None:
        """Allocate those slabs for `total` bytes that are not there yet: pinned, or pageable with a warning."""
        sizes = [min(SLAB_BYTES, total - start) for start in range(0, total, SLAB_BYTES)]
        if self._slabs and len(self._slabs) <= len(sizes) and len(self._slabs[-1]) < sizes[len(self._slabs) - 1]:
            self._slabs.pop()
        missing = sizes[len(self._slabs) :]
        needed, free = sum(missing) * self._ranks, host.memory_bytes(Path("/"))[1]
        if needed and self._pins and needed + SPARE_BYTES > free:
            self._pin_no_more(total, f"{format_bytes(needed)} more are needed, {format_bytes(free)} are free")
        self._slabs += [self._slab(size, total) for size in missing]

    def _slab(self, size: int, total: int) -> torch.Tensor:
        if self._pins:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pin_no_more(total, str(error).strip().partition("\n")[0])
        return torch.empty(size, dtype=torch.uint8)

    def _pin_no_more(self, total: int, reason: str) -> None:
        self._pins = False
        logger.warning(
            "%s of the host's memory cannot be pinned for weights (%s): sleep and wake-up take several times as long",
            format_bytes(total),
            reason,
            extra=event_fields("weights-not-pinned", bytes=total),
        )


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor as a uint8 tensor of one dim, which shares it."""
    count, rest = divmod(tensor.untyped_storage().nbytes(), tensor.itemsize)
    assert not rest, "a storage of whole numbers"
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)
