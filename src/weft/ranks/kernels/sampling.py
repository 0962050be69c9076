"""The part of the kernels that draws tokens from logits and scores them: protocols, and the settings of requests."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from weft.machine.native.structures import MASK_BITS

Array = TypeVar("Array", bound=np.ndarray | torch.Tensor)

# Columns of `SlotSettings`, as the kernels read them; cpp/sampling.h has the same names.
COLUMNS = ("temperature", "log_min_p", "top_k", "top_p")
TEMPERATURE, LOG_MIN_P, TOP_K, TOP_P = range(len(COLUMNS))


class SamplingSettings(NamedTuple):
    """The parameters of a request that its tokens are drawn with, by their names in SamplingParams.

    `temperature` 0 is greedy sampling, and so is a `top_k` of 1; a `top_k` of 0 keeps all tokens.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: float = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def filters(self) -> bool:
        """True if some tokens may be filtered out before one is drawn."""
        return not self.greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)

    @property
    def row(self) -> tuple[float, ...]:
        """The values of COLUMNS."""
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        return 0.0 if self.greedy else self.temperature, log_min_p, self.top_k, self.top_p


class SettingsUpdate(NamedTuple, Generic[Array]):
    """Sampling settings that have changed, for a token sampler that keeps them on the device."""

    slots: Array  # [n] int64
    columns: Array  # [n, len(COLUMNS)] float64, see `SlotSettings`
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
    """Sampling settings by request slot: `columns` [slots, len(COLUMNS)] float64, and the `keys` [slots] uint64 of the
    random streams."""

    def __init__(self, slots: int) -> None:
        self.columns = np.tile(np.array(SamplingSettings().row, dtype=np.float64), (slots, 1))
        self.keys = np.zeros(slots, dtype=np.uint64)

    def admit(self, slot: int, settings: SamplingSettings, key: int) -> None:
        self.columns[slot] = settings.row
        self.keys[slot] = key


class HostTokenSampler:
    """Base of token samplers that read the settings on the host, so that none go to the device."""

    def __init__(self, slots: int) -> None:
        self._settings = SlotSettings(slots)

    def admit(self, slot: int, settings: SamplingSettings, key: int) -> None:
        self._settings.admit(slot, settings, key)

    def take_settings_update(self) -> None:
        return None
