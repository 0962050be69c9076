"""Host copies of a GPU's tensors, whose memory is given back meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostCopies:
    """Copies of the memory behind `tensors`, which is freed. The tensors are of no use until `restore`.

    Views keep sharing their memory, but it comes back at other addresses.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._copies = [(storage, torch.UntypedStorage(storage.nbytes())) for storage in storages.values()]
        for storage, copy in self._copies:
            copy.copy_(storage)
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the tensors' memory again, and copy the values back."""
        while self._copies:
            storage, copy = self._copies.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
