"""Tokens drawn and scored in C++."""

from __future__ import annotations

import numpy as np
import torch

from weft.machine.native.entries import Entries
from weft.ranks.kernels.random import seeds
from weft.ranks.kernels.sampling import COLUMNS, HostTokenSampler, SampledRows


class NativeSampling:
    """The C++ implementation of `Sampling`."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def create_token_sampler(self, slots: int) -> NativeTokenSampler:
        theirs = tuple(self._entries.setting_names().decode().split())
        assert theirs == COLUMNS, f"sampling settings are {theirs} in C++ and {COLUMNS} in Python"
        return NativeTokenSampler(slots, self._entries)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        """The logprobs of `Sampling.score`. Logits are of the entries' dtype or float32, targets contiguous."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        figures = torch.empty(len(logits), 2 + 2 * top, dtype=torch.float64)
        self._entries.score(
            logits.data_ptr(),
            logits.itemsize,
            *logits.shape,
            logits.stride(0),
            targets.data_ptr(),
            top,
            figures.data_ptr(),
        )
        return figures

    def apply_masks(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        self._entries.apply_masks(
            logits.data_ptr(),
            logits.itemsize,
            logits.shape[1],
            logits.stride(0),
            rows.data_ptr(),
            masks.data_ptr(),
            len(rows),
        )


class NativeTokenSampler(HostTokenSampler):
    """The C++ implementation of `TokenSampler`, for logits of the entries' dtype or float32."""

    def __init__(self, slots: int, entries: Entries) -> None:
        super().__init__(slots)
        self._entries = entries

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampledRows[np.ndarray], tensors: SampledRows[torch.Tensor]
    ) -> torch.Tensor:
        settings, keys = self._settings.columns[arrays.slots], self._settings.keys[arrays.slots]
        streams = seeds(keys, arrays.positions)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._entries.sample(
            logits.data_ptr(),
            logits.itemsize,
            *logits.shape,
            logits.stride(0),
            settings.ctypes.data,
            streams.ctypes.data,
            tokens.data_ptr(),
        )
        return tokens
