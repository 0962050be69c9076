"""Choosers: the token of each row, as the request in its slot asks; by the kernels that the model runs with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from weft.core.params import SamplingParams
from weft.kernels.base import Kernels
from weft.kernels.native import NativeKernels
from weft.kernels.streams import NOT_FINITE
from weft.worker.chunks import chunks, pick
from weft.worker.filters import NEUTRAL, TEMPERATURE, weigh
from weft.worker.random import race, seeds
from weft.worker.staging import sent


class Chooser(Protocol):
    """All draw the same tokens, but where rounding decides."""

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        """A request with the key of its random stream takes a slot."""
        ...

    def arrays(self) -> list[np.ndarray]:
        """What the device has to be told before the next choice, beside slots and positions."""
        ...

    def choose(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, there: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Token ids [R] int64 on the device, from `logits` [R, V] of any float type, which stay as they are; NOT_FINITE
        for a row whose greatest logit is not finite. Slots and positions are [R] int64; `there` has them on the device,
        and then what `arrays` gave."""
        ...


class Settings:
    """What the requests ask of a draw, by slot: `columns` [slots, 4] float64 as `weigh` takes them, temperature 0 for
    greedy, and `keys` [slots] uint64."""

    def __init__(self, slots: int) -> None:
        self.columns = np.tile(np.array(NEUTRAL, dtype=np.float64), (slots, 1))
        self.keys = np.zeros(slots, dtype=np.uint64)

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        greedy = params.greedy or params.top_k == 1
        log_min_p = math.log(params.min_p) if params.min_p else -math.inf
        self.columns[slot] = 0.0 if greedy else params.temperature, log_min_p, params.top_k, params.top_p
        self.keys[slot] = key


class HostChooser:
    """What those share who read the settings on the host: the device need not be told of them."""

    def __init__(self, slots: int) -> None:
        self._settings = Settings(slots)

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        self._settings.admit(slot, params, key)

    def arrays(self) -> list[np.ndarray]:
        return []


class TorchChooser(HostChooser):
    """On any device."""

    def choose(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, there: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        logits = logits.float()
        columns = self._settings.columns[slots]
        warm = np.flatnonzero(columns[:, TEMPERATURE])
        best, tokens = logits.max(-1)  # the first of equals, and NaN before all
        if warm.size:
            columns = columns[warm]
            streams = sent(seeds(self._settings.keys[slots[warm]], positions[warm]), logits.device)
            parts = chunks(len(warm), logits)
            drawn = torch.cat([race(weigh(pick(logits, warm[at]), columns[at]), streams[at]) for at in parts])
            tokens = drawn if len(warm) == len(slots) else tokens.index_copy(0, sent(warm, logits.device), drawn)
        return tokens.where(best.isfinite(), NOT_FINITE)


class NativeChooser(HostChooser):
    """On a CPU, with its kernels in C++."""

    def __init__(self, slots: int, kernels: NativeKernels) -> None:
        super().__init__(slots)
        self._kernels = kernels

    def choose(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, there: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        columns, keys = self._settings.columns[slots], self._settings.keys[slots]
        return self._kernels.sample_tokens(logits, columns, seeds(keys, positions))


class TritonChooser:
    """On a GPU, which keeps the settings: it hears of a slot's when they have changed."""

    def __init__(self, slots: int, device: torch.device) -> None:
        # Here, since Triton may not be installed.
        from weft.kernels.triton.sampling import sample_tokens

        self._choose = sample_tokens
        self._settings = Settings(slots)
        self._filtered = np.zeros(slots, dtype=bool)
        self._news: set[int] = set()
        self._columns = torch.zeros(self._settings.columns.shape, dtype=torch.float64, device=device)
        self._keys = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        self._settings.admit(slot, params, key)
        filters = params.min_p > 0 or params.top_k > 1 or params.top_p < 1
        self._filtered[slot] = filters and not params.greedy
        self._news.add(slot)

    def arrays(self) -> list[np.ndarray]:
        new = np.array([*self._news], dtype=np.int64)
        self._news.clear()
        return [new, self._settings.columns[new], self._settings.keys[new].view(np.int64)]

    def choose(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, there: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        slots_, positions_, new, columns, keys = there
        if len(new):
            self._columns.index_copy_(0, new, columns)
            self._keys.index_copy_(0, new, keys)
        filtered = bool(self._filtered[slots].any())
        return self._choose(logits, slots_, positions_, self._columns, self._keys, filtered=filtered)


def chooser(kernels: Kernels, slots: int, device: torch.device) -> Chooser:
    """The one that goes with a model's kernels."""
    if isinstance(kernels, NativeKernels):
        return NativeChooser(slots, kernels)
    return TorchChooser(slots) if kernels.name == "torch" else TritonChooser(slots, device)
