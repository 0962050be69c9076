"""Memory to which each rank of a group publishes its part of a sum, for all ranks to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TURNS = 2  # buffers that take turns


class Parts:
    """Memory of every rank of a group, in two turns.

    `places[turn][rank]` is flat memory of that rank, which every rank can read. `barrier` makes this rank's device wait
    until the devices of all ranks have reached it, with everything that they wrote before.

    One barrier per sum is enough. A device works in order: it copies its part into its place, reaches the barrier and
    reads the others' parts. Before it copies the next part into the same place it has reached another barrier, for the
    sum of the other turn. Every rank came to that barrier only after it had read the parts of the first sum. So no part
    is overwritten while it is read, however late a rank is.

    A sum that does not use these places (`SymmetricGroup.sum`) is a barrier as well: after it any place is free, and
    the caller says so with `begin`. A CUDA graph keeps the turns with which it was captured. So graphs may be replayed
    in any order only if every step ends with such a sum. `DecoderModel.hidden` ends with such a sum.
    """

    def __init__(self, places: Sequence[Sequence[torch.Tensor]], rank: int, barrier: Callable[[], None]) -> None:
        assert len(places) == TURNS, len(places)
        self.places = places
        self._rank, self._barrier = rank, barrier
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
        """Start the turns again. A sum of another kind, which is a barrier of all ranks, follows or has just ended."""
        self._turn = 0

    def publish(self, x: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Publish `x`, this rank's part, and have the device wait for the parts of the other ranks.

        Returns the addresses of all parts, [size] int64 on the device, and the flat buffers that begin there, longer
        than `x`. Both are valid until the next part but one is published.
        """
        turn = self._turn
        self._turn = (turn + 1) % TURNS
        self.places[turn][self._rank][: x.numel()].view(x.shape).copy_(x)
        self._barrier()
        return self._addresses[turn], self.places[turn]
