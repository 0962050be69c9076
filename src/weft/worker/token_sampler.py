"""Token samplers: one token per row of logits, drawn as the request in its slot asks, in torch, C++ or Triton."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from weft.core.params import SamplingParams
from weft.kernels.base import Kernels
from weft.kernels.native import NativeKernels
from weft.kernels.streams import NOT_FINITE
from weft.worker.chunks import pick_rows, row_chunks
from weft.worker.filters import NEUTRAL, TEMPERATURE, weigh
from weft.worker.random import race, seeds
from weft.worker.sample_arrays import SampleArrays, SettingsUpdate
from weft.worker.staging import copy_to_device


class TokenSampler(Protocol):
    """Draws tokens from logits. All implementations draw the same tokens, except where rounding decides."""

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        """Give a slot to a request whose random stream has this key."""
        ...

    def take_settings_update(self) -> SettingsUpdate[np.ndarray] | None:
        """Return the settings that the device does not have yet; the next call of `sample_tokens` has to bring them."""
        ...

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampleArrays[np.ndarray], tensors: SampleArrays[torch.Tensor]
    ) -> torch.Tensor:
        """Draw a token for each row: [R] int64 on the device, NOT_FINITE for a row whose greatest logit is not finite.

        `logits` [R, V] of any float type are not changed. `tensors` are the `arrays` on the device.
        """
        ...


class SamplingSettings:
    """Sampling settings by request slot.

    `columns` [slots, 4] float64 are the settings of `filters.weigh`, with temperature 0 for greedy sampling; `keys`
    [slots] uint64 are the keys of the random streams.
    """

    def __init__(self, slots: int) -> None:
        self.columns = np.tile(np.array(NEUTRAL, dtype=np.float64), (slots, 1))
        self.keys = np.zeros(slots, dtype=np.uint64)

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        greedy = params.greedy or params.top_k == 1
        log_min_p = math.log(params.min_p) if params.min_p else -math.inf
        self.columns[slot] = 0.0 if greedy else params.temperature, log_min_p, params.top_k, params.top_p
        self.keys[slot] = key


class HostTokenSampler:
    """Base of token samplers that read the settings on the host, so that none go to the device."""

    def __init__(self, slots: int) -> None:
        self._settings = SamplingSettings(slots)

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        self._settings.admit(slot, params, key)

    def take_settings_update(self) -> None:
        return None


class TorchTokenSampler(HostTokenSampler):
    """Token sampler in plain torch, for any device."""

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampleArrays[np.ndarray], tensors: SampleArrays[torch.Tensor]
    ) -> torch.Tensor:
        logits = logits.float()
        slots, positions = arrays.slots, arrays.positions
        columns = self._settings.columns[slots]
        drawn = np.flatnonzero(columns[:, TEMPERATURE])  # rows that are not greedy
        best, tokens = logits.max(-1)  # the first of equals, and NaN before all
        if drawn.size:
            columns = columns[drawn]
            streams = copy_to_device(seeds(self._settings.keys[slots[drawn]], positions[drawn]), logits.device)
            chunks = row_chunks(len(drawn), logits)
            drawn_tokens = torch.cat(
                [race(weigh(pick_rows(logits, drawn[at]), columns[at]), streams[at]) for at in chunks]
            )
            if len(drawn) == len(slots):
                tokens = drawn_tokens
            else:
                tokens = tokens.index_copy(0, copy_to_device(drawn, logits.device), drawn_tokens)
        return tokens.where(best.isfinite(), NOT_FINITE)


class NativeTokenSampler(HostTokenSampler):
    """Token sampler of the CPU kernels in C++."""

    def __init__(self, slots: int, kernels: NativeKernels) -> None:
        super().__init__(slots)
        self._kernels = kernels

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampleArrays[np.ndarray], tensors: SampleArrays[torch.Tensor]
    ) -> torch.Tensor:
        columns, keys = self._settings.columns[arrays.slots], self._settings.keys[arrays.slots]
        return self._kernels.sample_tokens(logits, columns, seeds(keys, arrays.positions))


class TritonTokenSampler:
    """Token sampler of the Triton kernels. The GPU keeps the settings, and gets those of a slot when they change."""

    def __init__(self, slots: int, device: torch.device) -> None:
        # Here, since Triton may not be installed.
        from weft.kernels.triton.sampling import sample_tokens

        self._sample = sample_tokens
        self._settings = SamplingSettings(slots)
        self._filtered = np.zeros(slots, dtype=bool)
        self._changed: set[int] = set()
        self._columns = torch.zeros(self._settings.columns.shape, dtype=torch.float64, device=device)
        self._keys = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, params: SamplingParams, key: int) -> None:
        self._settings.admit(slot, params, key)
        filters = params.min_p > 0 or params.top_k > 1 or params.top_p < 1
        self._filtered[slot] = filters and not params.greedy
        self._changed.add(slot)

    def take_settings_update(self) -> SettingsUpdate[np.ndarray] | None:
        if not self._changed:
            return None
        slots = np.array([*self._changed], dtype=np.int64)
        self._changed.clear()
        return SettingsUpdate(slots, self._settings.columns[slots], self._settings.keys[slots].view(np.int64))

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampleArrays[np.ndarray], tensors: SampleArrays[torch.Tensor]
    ) -> torch.Tensor:
        if tensors.settings is not None:
            self._columns.index_copy_(0, tensors.settings.slots, tensors.settings.columns)
            self._keys.index_copy_(0, tensors.settings.slots, tensors.settings.keys)
        filtered = bool(self._filtered[arrays.slots].any())
        return self._sample(logits, tensors.slots, tensors.positions, self._columns, self._keys, filtered=filtered)


def create_token_sampler(kernels: Kernels, slots: int, device: torch.device) -> TokenSampler:
    """Create the token sampler that goes with a model's kernels."""
    if isinstance(kernels, NativeKernels):
        return NativeTokenSampler(slots, kernels)
    return TorchTokenSampler(slots) if kernels.name == "torch" else TritonTokenSampler(slots, device)
