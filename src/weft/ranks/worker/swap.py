"""Weights of another checkpoint, on their way into the model of a rank.

They are read, converted and rounded in the host's memory. The model takes them only when every rank has all of its own
there, and what is left then is to copy them. So an engine has one checkpoint's weights, whatever a file or a rank does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from weft.errors import ModelError, WeftError, error_reason
from weft.formatting import format_bytes
from weft.machine.hardware import host
from weft.plan.plan import Plan
from weft.ranks.comm import Links
from weft.ranks.comm.current_device import enter_device
from weft.ranks.kernels.base import Kernels
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.quant.rounding import Rounding
from weft.ranks.weights.load import allocate_parameters, load_weights, open_source, parameter_groups
from weft.ranks.worker.importance import measure_importance, rounds_by_importance

CPU, META = torch.device("cpu"), torch.device("meta")
SPARE_BYTES = 256 << 20  # of the host's memory that staged weights leave: threads read into some of it


class SwappedModel(Protocol):
    """A model whose parameters can be given other values, see `DecoderModel.replace`."""

    kernels: Kernels

    def replace(self, name: str, weight: torch.Tensor | QuantisedWeight) -> None: ...


class SwapRefusedError(WeftError):
    """Weights that a rank cannot take; its present weights stay as they are."""


class WeightSwap:
    """The weights of rank `rank` by `plan`, whose checkpoint is another than the model's.

    All ranks `check`, then `stage`, then `move_into` their models, each if all ranks have done what comes before. The
    host's memory has room for all weights of its ranks a second time. A GPU needs, besides its model, the memory of one
    step of 64 tokens if importance is measured. If it rounds, it also needs one band of a matrix at a time: as many
    rows as have 512 Ki numbers, but a whole head. For a matrix of 28,672 columns in bfloat16 this is 10 MB.
    """

    def __init__(self, plan: Plan, rank: int, links: Links, device: torch.device, rounding: Rounding) -> None:
        self.plan, self._rank, self._links, self._device = plan, rank, links, device
        self._rounding = rounding if device.type == "cpu" else through_device(rounding, device)
        self._staged: dict[str, torch.Tensor | QuantisedWeight] = {}

    def check(self, *, asleep: bool) -> None:
        """Find out what can be known before any rank waits for another one. Raises SwapRefusedError.

        Names, dims and types of the tensors are checked, and the room in the host's memory unless the rank is `asleep`.
        All is read once, a layer at a time, if ranks are to exchange numbers before the weights are staged, or asleep:
        then `stage` is not called.
        """
        plan = self.plan
        with refusing():
            if plan.load_format != "sharded_state":
                open_source(plan)
            if not asleep:
                self._check_room()
            if asleep or rounds_by_importance(plan):
                for names in parameter_groups(plan, plan.places[self._rank]):
                    self._read_parameters(names, lambda weight, into, importance: None, {})

    def stage(self) -> None:
        """Read the weights into the host's memory. Raises SwapRefusedError, after which nothing is staged.

        An error while ranks exchange numbers, for the importance of columns, is none: it ends the rank.
        """
        plan, place = self.plan, self.plan.places[self._rank]
        importance: Mapping[str, torch.Tensor] = {}
        if rounds_by_importance(plan):
            outline = allocate_parameters(plan, place, self._device, matrices=META)
            importance = measure_importance(plan, self._rank, self._links, outline, self._device)
        try:
            with refusing():
                for names in parameter_groups(plan, place):
                    self._staged |= self._read_parameters(names, self._rounding, importance)
        except SwapRefusedError:
            self._staged.clear()
            raise

    def check_kernels(self, model: SwappedModel) -> None:
        """Raise SwapRefusedError if kernels of the model cannot take a staged weight."""
        matrices = model.kernels.matrices
        reasons = (matrices.against_replacing(name, weight) for name, weight in self._staged.items())
        if reason := next(filter(None, reasons), None):
            self._staged.clear()
            raise SwapRefusedError(reason, code="weights-not-replaceable")

    def move_into(self, model: SwappedModel) -> None:
        """Give a model the staged weights, in the memory that it has. A GPU allocates nothing for Weft's own kernels,
        and a few bands for humming-kernels, which repack the weights there."""
        while self._staged:
            model.replace(*self._staged.popitem())
        model.kernels.matrices.refresh_biases()

    def _read_parameters(
        self, names: Sequence[str], rounding: Rounding, importance: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor | QuantisedWeight]:
        """Some of the parameters, in the host's memory."""
        place = self.plan.places[self._rank]
        targets = allocate_parameters(self.plan, place, CPU, names=names)
        load_weights(self.plan, place, targets, rounding, importance)
        return targets

    def _check_room(self) -> None:
        """Raise ModelError unless the host has room for the weights of all ranks of this node."""
        plan, node = self.plan, self.plan.devices[self._rank].node
        outlines = [allocate_parameters(plan, plan.places[rank], META) for rank in plan.ranks_of(node)]
        need = sum(target.nbytes for outline in outlines for target in outline.values()) + SPARE_BYTES
        free = host.memory_bytes(Path("/"))[1]
        if need > free:
            raise ModelError(
                f"the new weights need {format_bytes(need)} of the host's memory until all ranks have them, and "
                f"{format_bytes(free)} are free; let the engine sleep at level 2 first, which reads them when it wakes",
                code="no-memory-to-swap",
            )


@contextmanager
def refusing() -> Iterator[None]:
    """Make any error a SwapRefusedError, with its code."""
    try:
        yield
    except Exception as error:
        code = error.code if isinstance(error, WeftError) else "weights-not-read"
        raise SwapRefusedError(error_reason(error) or type(error).__name__, code=code) from error


def through_device(rounding: Rounding, device: torch.device) -> Rounding:
    """The rounding of a GPU, for weights in the host's memory: one band of them is on the GPU at a time."""
    turn = threading.Lock()

    def round_band(weight: torch.Tensor, into: QuantisedWeight, importance: torch.Tensor | None = None) -> None:
        with turn:
            enter_device(device)
            made = into.empty_on(device)
            rounding(weight.to(device), made, importance)
            for name, part in made.parts.items():
                into.parts[name].copy_(part)

    return round_band
