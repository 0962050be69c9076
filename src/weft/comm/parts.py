"""Parts: memory in which each rank of a group lays its part of a sum, for all of them to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

PLACES = 2


class Parts:
    """`places[turn][rank]` is flat memory of that rank, which every rank can read, in two turns; `meet` has this rank's
    device wait until all ranks' devices have come there, with what they wrote before.

    One meeting per sum is enough. A device does one thing after the other: it lays its part into its place, meets the
    others, reads theirs. Before it lays the next part into the same place it has met them again, for the sum of the
    other turn, and each of them came to that meeting only after it had read the last one. So none is overwritten that
    is still read, however late a rank is.

    Sums of another kind are meetings as well: after one of them any place is free, and `begin` says so. What is
    captured in a CUDA graph has its turns for good; as it begins and ends with such a sum, or follows one, that holds
    for graphs in any order.
    """

    def __init__(self, places: Sequence[Sequence[torch.Tensor]], rank: int, meet: Callable[[], None]) -> None:
        assert len(places) == PLACES, len(places)
        self.places = places
        self._rank, self._meet = rank, meet
        self._addresses = torch.tensor(
            [[memory.data_ptr() for memory in turn] for turn in places], device=places[0][rank].device
        )
        self._turn = 0

    @property
    def device(self) -> torch.device:
        return self._addresses.device

    @property
    def dtype(self) -> torch.dtype:
        return self.places[0][0].dtype

    def begin(self) -> None:
        """All ranks have met since the last part was laid."""
        self._turn = 0

    def publish(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Lay x, this rank's part, and meet the others: the addresses of all parts, [size] int64 on the device, and
        the memory that begins there. Valid until the next part but one is laid."""
        turn = self._turn
        self._turn = (turn + 1) % PLACES
        self.places[turn][self._rank][: x.numel()].view(x.shape).copy_(x)
        self._meet()
        return self._addresses[turn], self.places[turn]
