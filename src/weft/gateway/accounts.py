"""Accounts: what requests may take and have taken: rates and quotas of keys, and the budget of overflow upstreams."""

from __future__ import annotations

from collections.abc import Sequence

from weft.gateway.config import Budget, ClientKey, UpstreamConfig
from weft.gateway.exchange import Exchange
from weft.gateway.ledger import DAY_HOURS, Amount, Ledger
from weft.gateway.rates import Rates
from weft.gateway.replica import Replica
from weft.serving.errors import HttpError

MILLION = 1e6
DEFAULT_ANSWER = 4096  # tokens that an overflow upstream may answer if the client sets no limit


class Accounts:
    """The accounts of a gateway. Without a ledger only rates count."""

    def __init__(self, keys: Sequence[ClientKey], ledger: Ledger | None, budget: Budget | None) -> None:
        self.ledger, self.budget = ledger, budget
        self._rates = Rates(keys)
        self._quotas = {key.name: key.quota for key in keys if key.quota is not None}

    def enter(self, exchange: Exchange) -> None:
        """Count a request of a key. Raises HttpError 429 if a rate or a quota forbids it."""
        name, tokens = exchange.client.name, exchange.prompt_tokens
        quota = self._quotas.get(name or "")
        if quota is not None and self.ledger is not None and name is not None:
            for period, hours, most in (("hour", 1, quota.hour), ("day", DAY_HOURS, quota.day)):
                if most is not None and self.ledger.tokens(name, hours) + tokens > most:
                    raise HttpError(
                        429,
                        f"the key {name!r} may take {most} tokens in a {period}, and has taken them",
                        code="quota-exceeded",
                        retry_after_s=self.ledger.seconds_left(),
                    )
        self._rates.enter(name, tokens)
        exchange.entered = True

    def affords(self, exchange: Exchange, replica: Replica) -> bool:
        """Return True if the budget has room for a request at an overflow upstream."""
        if self.ledger is None or self.budget is None:
            return False
        dollars = self._most(exchange, replica).dollars
        limits = ((1, self.budget.hour), (DAY_HOURS, self.budget.day))
        return all(most is None or self.ledger.dollars(hours) + dollars <= most for hours, most in limits)

    def reserve(self, exchange: Exchange, replica: Replica) -> None:
        """Reserve the most that a request can take at a replica."""
        if self.ledger is not None and exchange.completion is not None:
            most = self._most(exchange, replica)
            name = exchange.client.name or ""
            exchange.reservation = self.ledger.reserve(name, exchange.model, replica.name, most)
            exchange.reserved_at = replica

    def cancel(self, exchange: Exchange, *, billed: bool) -> None:
        """Settle a try without an answer. If the upstream may have worked for it (`billed`), its dollars are gone."""
        if exchange.reservation is not None and self.ledger is not None:
            spent = Amount(dollars=exchange.reservation.amount.dollars if billed else 0.0)
            self.ledger.settle(exchange.reservation, spent, requests=0)
            exchange.reservation = None

    def leave(self, exchange: Exchange) -> None:
        """Settle a request that has ended."""
        reservation, taken = exchange.reservation, Amount()
        if reservation is not None and self.ledger is not None and exchange.reserved_at is not None:
            taken = self._taken(exchange, exchange.reserved_at, reservation.amount)
            self.ledger.settle(reservation, taken)
            exchange.reservation = None
        if exchange.entered:
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

    def _most(self, exchange: Exchange, replica: Replica) -> Amount:
        """The most that a request can take. No token is shorter than a byte; the quota counts as many as are likely."""
        completion = exchange.completion
        assert completion is not None
        answer = completion.choices * (DEFAULT_ANSWER if completion.max_tokens is None else completion.max_tokens)
        dollars = price_of(replica.config, replica.own_name(exchange.model), exchange.bytes_in, answer)
        return Amount(exchange.prompt_tokens, answer, dollars)

    @staticmethod
    def _taken(exchange: Exchange, replica: Replica, most: Amount) -> Amount:
        """Amount that a request took: by the usage of its answer, else nothing if it was refused, else all it could."""
        usage = exchange.answer.usage if exchange.answer is not None else None
        prompt, completion = ((usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens"))
        if isinstance(prompt, int) and isinstance(completion, int):
            return Amount(
                prompt, completion, price_of(replica.config, replica.own_name(exchange.model), prompt, completion)
            )
        return Amount() if exchange.status >= 400 else most


def price_of(upstream: UpstreamConfig, model: str, prompt: int, completion: int) -> float:
    """Dollars of a request at an upstream; 0 at one that is not marked `overflow`. Raises ConfigError."""
    if not upstream.overflow:
        return 0.0
    if upstream.price is not None:
        return (prompt * upstream.price.input + completion * upstream.price.output) / MILLION
    from weft.planner.api_prices import Usage, find_quote

    return find_quote(model, Usage(max(prompt, 1), 0, max(completion, 1))).dollars
