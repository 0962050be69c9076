"""Rates: requests and tokens per minute, and requests at once, that each key of a gateway may have."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weft.fleet.accounts.shares import Shares
from weft.http.key_file import ClientKey
from weft.http.key_rates import KeyRates


class Rates:
    """The limits `rpm`, `tpm` and `concurrent` of keys, by their names, and the shares of the gateway's own limit."""

    def __init__(self, keys: Sequence[ClientKey], concurrent: int | None = None) -> None:
        self._shares = None if concurrent is None else Shares(concurrent, _weights_of(keys), time.monotonic)
        self._rates = KeyRates(keys)
        self._counts = bool(keys) or concurrent is not None

    def change(self, keys: Sequence[ClientKey]) -> None:
        """Enforce the limits of these keys from now on; running requests and the counts of the minute stay.

        Raises ConfigError for limits that need a missing package.
        """
        self._rates.change(keys)
        if self._shares is not None:
            self._shares.change_weights(_weights_of(keys))

    def enter(self, name: str | None, tokens: int) -> bool:
        """Count a request whose prompt has about `tokens` tokens. Return True if its end must be reported to `leave`.

        Raises HttpError 429 if a limit forbids it.
        """
        tokens = max(tokens, 1)
        self._rates.test(name or "", requests=1, tokens=tokens)
        if self._shares is not None:
            self._shares.enter(name or "")
        self._rates.enter(name or "", tokens=tokens)
        return self._counts

    def limits(self, name: str | None) -> bool:
        """Return True if a key has one of the limits."""
        return self._rates.limits(name or "")

    def counts_tokens(self, name: str | None) -> bool:
        """Return True if a key has a limit of tokens."""
        return self._rates.counts_tokens(name or "")

    def leave(self, name: str | None, tokens: int) -> None:
        """Note the end of a request that `enter` counted; it took `tokens` more tokens than `enter` counted."""
        if self._shares is not None:
            self._shares.leave(name or "")
        self._rates.leave(name or "")
        self._rates.count_answer(name or "", tokens)


def _weights_of(keys: Sequence[ClientKey]) -> dict[str, float]:
    return {key.name: key.weight for key in keys if key.weight is not None}
