"""Accounts: rates and quotas of keys, and the budget of overflow upstreams."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from typing import Any

from weft.fleet.accounts.ledger import DAY_HOURS, Amount, Ledger
from weft.fleet.accounts.prices import TOOL_TOKENS, price_of
from weft.fleet.accounts.rates import Rates
from weft.fleet.gateway.answer import ResumableAnswer
from weft.fleet.gateway.completion import COUNTED, MAX_TOKENS
from weft.fleet.gateway.exchange import Exchange
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.http.errors import HttpError
from weft.http.key_file import ClientKey, SpendingLimits

log = logging.getLogger("weft.gateway")

DEFAULT_ANSWER = 4096  # limit of an overflow upstream's answer in tokens if the client sets none
WITHOUT_ANSWER = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show")
MAX_USAGE_TOKENS = 2**53  # larger reported numbers of tokens are ignored: JSON's numbers are not exact beyond this


class Accounts:
    """The accounts of a gateway. Without a ledger only rates count."""

    def __init__(
        self,
        keys: Sequence[ClientKey],
        ledger: Ledger | None,
        budget: SpendingLimits | None,
        concurrent: int | None = None,
    ) -> None:
        self.ledger, self.budget = ledger, budget
        self._rates = Rates(keys, concurrent)
        self._quotas = _quotas_of(keys)

    def change_keys(self, keys: Sequence[ClientKey]) -> None:
        """Enforce the limits of these keys from now on; the counts stay. Raises ConfigError for unknown limits."""
        self._rates.change(keys)
        self._quotas = _quotas_of(keys)

    def meters(self, exchange: Exchange) -> bool:
        """Return True if the tokens of a request's answer count."""
        return self.ledger is not None or self._rates.counts_tokens(exchange.client.name)

    def limits_tokens(self, name: str | None) -> bool:
        """Return True if a key has a limit of tokens."""
        return name in self._quotas or self._rates.counts_tokens(name)

    def counts_requests(self, name: str | None) -> bool:
        """Return True if the requests of a key are counted: by its limits, or by the ledger."""
        return self.ledger is not None or self._rates.limits(name)

    def enter(self, exchange: Exchange) -> None:
        """Count a request of a key. Raises HttpError 429 if a rate or quota forbids it, 503 if the ledger fails."""
        name, tokens = exchange.client.name, exchange.prompt_tokens
        if name in self._quotas:
            self._check_counted(exchange)
            try:
                self._check_quota(name, tokens)
            except sqlite3.Error as error:
                raise HttpError(
                    503, f"the ledger of the gateway cannot be read: {error}", code="ledger-not-read"
                ) from None
        exchange.entered = self._rates.enter(name, tokens)

    @staticmethod
    def _check_counted(exchange: Exchange) -> None:
        """Raise HttpError 403 for a request whose tokens no quota would count."""
        method, path = exchange.scope["method"], exchange.scope["path"]
        if exchange.completion is None and method not in ("GET", "HEAD") and path not in WITHOUT_ANSWER:
            raise HttpError(
                403,
                f"the key {exchange.client.name!r} has a quota, which counts {', '.join(COUNTED)}; {path!r:.200} "
                "needs a key without a quota",
                code="path-without-quota",
            )

    def _check_quota(self, name: str | None, tokens: int) -> None:
        """Raise HttpError 429 if a key has no room for a prompt of about `tokens` tokens in its quota."""
        quota = self._quotas[name]
        if self.ledger is None:
            return
        for period, hours, most in (("this hour", 1, quota.hour), ("24 hours", DAY_HOURS, quota.day)):
            taken = self.ledger.tokens(name or "", hours)
            if most is not None and taken + tokens > most:
                raise HttpError(
                    429,
                    f"the key {name!r} has taken {taken} of its {most:g} tokens of {period}; this prompt has about "
                    f"{tokens}",
                    code="quota-exceeded",
                    retry_after_s=self.ledger.seconds_left(),
                )

    def affords(self, exchange: Exchange, replica: UpstreamReplica) -> bool:
        """Return True if the budget allows a request at an overflow upstream; False if the ledger cannot be read."""
        ledger = self.ledger
        if ledger is None or self.budget is None:
            return False
        dollars = self._most(exchange, replica).dollars
        limits = ((1, self.budget.hour), (DAY_HOURS, self.budget.day))
        try:
            return all(most is None or ledger.dollars(hours) + dollars <= most for hours, most in limits)
        except sqlite3.Error as error:
            log.error("no request is sent to overflow upstreams: the ledger cannot be read: %s", error)
            return False

    def reserve(self, exchange: Exchange, replica: UpstreamReplica) -> None:
        """Reserve the most that a request can take at a replica. Raises HttpError 503 if that cannot be written."""
        if self.ledger is None or exchange.completion is None:
            return
        most = self._most(exchange, replica)
        name = exchange.client.name or ""
        # Clients may send any other name, and each would get a row.
        model = exchange.model if exchange.model in (replica.models or ()) else ""
        try:
            exchange.reservation = self.ledger.reserve(name, model, replica.name, most)
        except sqlite3.Error as error:
            raise HttpError(
                503, f"the ledger of the gateway cannot be written: {error}", code="ledger-not-written"
            ) from None
        exchange.reserved_at = replica

    def cancel(self, exchange: Exchange, *, billed: bool) -> None:
        """Settle a try without an answer. If the upstream may bill it (`billed`), its dollars count as spent.

        If that cannot be written, the whole amount stays reserved.
        """
        reservation, exchange.reservation = exchange.reservation, None
        if reservation is None or self.ledger is None:
            return
        spent = Amount(dollars=reservation.amount.dollars if billed else 0.0)
        try:
            self.ledger.settle(reservation, spent, requests=0)
        except sqlite3.Error as error:
            log.error("a reservation of %s stays: the ledger cannot be written: %s", reservation.upstream, error)

    def leave(self, exchange: Exchange) -> None:
        """Settle a request that has ended. If that cannot be written, the whole amount stays reserved."""
        if exchange.reservation is None and not exchange.entered:
            return
        taken = usage_of(exchange) or Amount(exchange.prompt_tokens, tokens_of(exchange))
        try:
            reservation, replica = exchange.reservation, exchange.reserved_at
            if reservation is not None and self.ledger is not None and replica is not None:
                taken = self._taken(exchange, replica, reservation.amount)
                self.ledger.settle(reservation, taken)
                exchange.reservation = None
        except sqlite3.Error as error:
            log.error("a reservation of %s stays: the ledger cannot be written: %s", exchange.upstream, error)
        finally:
            if exchange.entered:
                exchange.entered = False
                self._rates.leave(exchange.client.name, taken.tokens - exchange.prompt_tokens)

    def describe(self) -> dict[str, object] | None:
        """Spending of today, for /gateway/status; None without a ledger."""
        ledger, budget = self.ledger, self.budget
        if ledger is None:
            return None
        return {
            "dollars_hour": ledger.dollars(1),
            "dollars_day": ledger.dollars(DAY_HOURS),
            "budget_hour": budget.hour if budget is not None else None,
            "budget_day": budget.day if budget is not None else None,
            "usage_day": ledger.rows(DAY_HOURS),
        }

    def _most(self, exchange: Exchange, replica: UpstreamReplica) -> Amount:
        """Upper bound on a request's amount: one token per byte for dollars, the likely number for quotas."""
        completion = exchange.completion
        assert completion is not None
        answer = 0
        if completion.answers:
            answer = min(completion.choices * (completion.max_tokens or DEFAULT_ANSWER), MAX_TOKENS)
        prompt = exchange.bytes_in + (TOOL_TOKENS if completion.has_tools else 0)
        dollars = price_of(replica.config, replica.own_name(exchange.model), prompt, answer)
        return Amount(exchange.prompt_tokens, answer, dollars)

    @staticmethod
    def _taken(exchange: Exchange, replica: UpstreamReplica, most: Amount) -> Amount:
        """Amount of a request: the usage of its answer; without it, the upper bound, or nothing if it was refused.

        An upstream that ignores the limit may have answered more.
        """
        usage = usage_of(exchange)
        if usage is None:
            if exchange.status >= 400:
                return Amount()
            return most._replace(completion_tokens=max(most.completion_tokens, tokens_of(exchange)))
        prompt, completion, _ = usage
        return Amount(
            prompt, completion, price_of(replica.config, replica.own_name(exchange.model), prompt, completion)
        )


def _quotas_of(keys: Sequence[ClientKey]) -> dict[str | None, SpendingLimits]:
    return {key.name: key.quota for key in keys if key.quota is not None}


def tokens_of(exchange: Exchange) -> int:
    """Tokens received of a stream, for a client that disconnects before the usage is reported."""
    return exchange.answer.tokens if isinstance(exchange.answer, ResumableAnswer) else 0


def usage_of(exchange: Exchange) -> Amount | None:
    """Tokens of a request by the usage that its upstream reported; None without a usage, or for an impossible usage."""
    usage: dict[str, Any] = (exchange.answer.usage if exchange.answer is not None else None) or {}
    prompt, completion = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    if completion is None and exchange.completion is not None and not exchange.completion.answers:
        completion = 0
    if type(prompt) is not int or type(completion) is not int:
        return None
    if not (0 <= prompt < MAX_USAGE_TOKENS and 0 <= completion < MAX_USAGE_TOKENS):
        return None
    return Amount(prompt, completion)
