"""The part of the kernels that draws tokens from logits and scores them: protocols, and the settings of requests."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from weft.machine.native.structures import MASK_BITS

Array = TypeVar("Array", bound=np.ndarray | torch.Tensor)

# Columns of `SlotSettings`.
TEMPERATURE, LOG_MIN_P, TOP_K, TOP_P = range(4)


class SamplingSettings(NamedTuple):
    """Settings that one request's tokens are drawn with. Mirrored in native/cpp/settings.h.

    `temperature` 0 is greedy sampling, a `top_k` of 0 keeps all tokens.
    """

    temperature: float
    log_min_p: float
    top_k: float
    top_p: float

    @property
    def filters(self) -> bool:
        """True if some tokens may be filtered out before one is drawn."""
        return self.temperature > 0 and (self.log_min_p > -math.inf or self.top_k > 0 or self.top_p < 1)


NEUTRAL = SamplingSettings(temperature=1.0, log_min_p=-math.inf, top_k=0, top_p=1.0)


class SettingsUpdate(NamedTuple, Generic[Array]):
    """Sampling settings that have changed, for a token sampler that keeps them on the device."""

    slots: Array  # [n] int64
    columns: Array  # [n, 4] float64, see `SlotSettings`
    keys: Array  # [n] int64


class SampledRows(Protocol[Array]):
    """R tokens to sample: what a token sampler reads of them."""

    @property
    def slots(self) -> Array:
        """Request slots: [R] int64."""
        ...

    @property
    def positions(self) -> Array:
        """Positions of the tokens in the requests' texts: [R] int64."""
        ...

    @property
    def settings(self) -> SettingsUpdate[Array] | None: ...


class TokenSampler(Protocol):
    """Draws tokens from logits. All implementations draw the same tokens, except where rounding decides."""

    def admit(self, slot: int, settings: SamplingSettings, key: int) -> None:
        """Give a slot to a request with these settings, whose random stream has this 64-bit key."""
        ...

    def take_settings_update(self) -> SettingsUpdate[np.ndarray] | None:
        """Return the settings that the device does not have yet; the next call of `sample_tokens` has to bring them."""
        ...

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampledRows[np.ndarray], tensors: SampledRows[torch.Tensor]
    ) -> torch.Tensor:
        """Draw a token for each row: [R] int64 on the device, NOT_FINITE for a row whose greatest logit is not finite.

        `logits` [R, V] of any float type are not changed. `tensors` are the `arrays` on the device.
        """
        ...


class Sampling(Protocol):
    """Tokens drawn from logits, and logprobs."""

    def create_token_sampler(self, slots: int) -> TokenSampler:
        """A token sampler of the requests in `slots` slots."""
        ...

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        """Score each row's target: [R, 2 + 2 * top] float64, so that ids and logprobs leave the device together.

        A row of the result holds the target's logprob and rank, then the ids of the `top` likeliest tokens, best first,
        then their logprobs. `logits` [R, V] of any float type are not changed; `targets` are [R] int64; `top` is at
        most V. The rank is 1 plus the number of tokens that are strictly likelier. Among equally likely tokens the
        lower id comes first, as in argmax. A NaN makes all logprobs of its row NaN, and the row's ids mean nothing.
        All implementations agree up to rounding.
        """
        ...

    def apply_masks(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set the logits of tokens that a row's mask does not allow to -inf, in place.

        `logits` [R, V] of any float type are contiguous along their last dim. `rows` [M] int64 are numbers of rows that
        have a mask each: `masks` [M, `mask_words`] int32. Bit i of word w is 1 if token MASK_BITS * w + i is allowed,
        as in xgrammar's bitmasks.
        """
        ...


def mask_words(vocab: int) -> int:
    """Number of words of a mask of `vocab` tokens."""
    return -(-vocab // MASK_BITS)


class SlotSettings:
    """Sampling settings by request slot: `columns` [slots, 4] float64, each row a request's `SamplingSettings`, and the
    `keys` [slots] uint64 of the random streams."""

    def __init__(self, slots: int) -> None:
        self.columns = np.tile(np.array(NEUTRAL, dtype=np.float64), (slots, 1))
        self.keys = np.zeros(slots, dtype=np.uint64)

    def admit(self, slot: int, settings: SamplingSettings, key: int) -> None:
        self.columns[slot] = settings
        self.keys[slot] = key


class HostTokenSampler:
    """Base of token samplers that read the settings on the host, so that none go to the device."""

    def __init__(self, slots: int) -> None:
        self._settings = SlotSettings(slots)

    def admit(self, slot: int, settings: SamplingSettings, key: int) -> None:
        self._settings.admit(slot, settings, key)

    def take_settings_update(self) -> None:
        return None
