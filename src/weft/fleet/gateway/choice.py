"""ReplicaChoice: the replica that gets a request next, and how long the request waits."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from weft.engine.replicas.suspects import LOST
from weft.fleet.gateway.accounts import Accounts
from weft.fleet.gateway.exchange import Exchange, client_gone
from weft.fleet.gateway.losses import Losses
from weft.fleet.upstreams.breaker import SHORTEST_S
from weft.fleet.upstreams.config import Objective, Timeouts
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.paths import ON_DISK
from weft.fleet.upstreams.replica import UpstreamReplica

# Replicas that a request is tried at: if this many cannot be reached, they have a fault in common.
TRIES = 8
POLL_S = 0.1  # between two searches for a replica
SECOND_CHANCE_S = 1.0  # after which a replica that broke an answer may continue it: it may have been restarted


class Patience(NamedTuple):
    """Waiting times of a request that was received at `began_s`.

    If no replica is left, it waits for one until `until_s`. All its tries together may take LOST times the `first_byte`
    of a try: at most LOST replicas may stall.
    """

    began_s: float
    timeouts: Timeouts

    @property
    def until_s(self) -> float:
        return self.began_s + self.timeouts.wait

    def first_byte_s(self, now: float) -> float:
        """Seconds for the first byte of the next try; 0 for no limit."""
        limit_s = self.timeouts.first_byte
        return min(limit_s, max(self.began_s + LOST * limit_s - now, SHORTEST_S))


class ReplicaChoice:
    """Chooses among the replicas of a fleet, by its policy, the objective, the budget and recent losses."""

    def __init__(
        self, fleet: Fleet, timeouts: Timeouts, accounts: Accounts, objective: Objective, losses: Losses
    ) -> None:
        self._fleet, self._timeouts, self._accounts = fleet, timeouts, accounts
        self._objective, self._losses = objective, losses

    def patience(self) -> Patience:
        """The waiting times of a request that begins now."""
        return Patience(self._fleet.clock(), self._timeouts)

    async def next_candidates(self, exchange: Exchange, patience: Patience) -> list[UpstreamReplica]:
        """The candidates for the next try, after waiting until there are some. Empty if no replica is healthy in time.

        Raises ClientGoneError, and HttpError for a refused request, such as one that repeats a request that ended
        replicas.
        """
        began = self._fleet.clock()
        while exchange.tries < TRIES:
            if exchange.gone:
                raise client_gone()
            self._losses.check(exchange)
            candidates, now = self.candidates(exchange), self._fleet.clock()
            if candidates and (free := self._losses.free(exchange, candidates, now - began)):
                return free
            if not candidates and (now >= patience.until_s or not self._may_wait(exchange)):
                return []
            if not candidates and now > began + SECOND_CHANCE_S:
                exchange.tried[:] = exchange.lost_at  # the others could not be reached
            await asyncio.sleep(POLL_S)
        return []

    def _may_wait(self, exchange: Exchange) -> bool:
        """Return True if a replica serves the model that the request has not been sent to."""
        if exchange.refusal is not None:
            return False
        return any(
            one.serves(exchange.model) and not one.draining and one not in exchange.lost_at
            for one in self._fleet.replicas.values()
        )

    def choose_candidate(self, exchange: Exchange, candidates: list[UpstreamReplica]) -> UpstreamReplica:
        """The policy's choice; always the same replica for data on a replica's disk."""
        if exchange.scope["path"].startswith(ON_DISK):
            return min(candidates, key=lambda replica: replica.name)
        return self._fleet.choose_replica(exchange.fingerprint, candidates)

    def candidates(self, exchange: Exchange) -> list[UpstreamReplica]:
        """The replicas that may get a request now; overflow upstreams only if the others are too busy, or absent."""
        candidates = self._fleet.candidates(exchange.model, exchange.tried)
        if exchange.owner:
            return [replica for replica in candidates if replica.is_weft and not replica.overflow]
        usual = [replica for replica in candidates if not replica.overflow]
        if len(usual) == len(candidates) or (usual and not self._is_too_busy(usual, exchange.prompt_tokens)):
            return usual
        return self._affordable(exchange, candidates) or usual

    def _affordable(self, exchange: Exchange, candidates: list[UpstreamReplica]) -> list[UpstreamReplica]:
        """The overflow upstreams that a request may go to: its price must be bounded, and within the budget."""
        if exchange.completion is None or not exchange.model or not exchange.completion.is_priced(exchange.body):
            return []
        return [replica for replica in candidates if replica.overflow and self._accounts.affords(exchange, replica)]

    def _is_too_busy(self, replicas: list[UpstreamReplica], tokens: int) -> bool:
        """Return True if no replica keeps the objective for a prompt of `tokens` tokens."""
        queue, ttft_s = self._objective.queue, self._objective.ttft_s
        if queue is not None and min(len(replica.unanswered) for replica in replicas) > queue:
            return True
        if ttft_s is None:
            return False
        predicted = [replica.predicted_ttft_s(tokens) for replica in replicas]
        return all(seconds is not None and seconds > ttft_s for seconds in predicted)

    def continuing(self, exchange: Exchange) -> list[UpstreamReplica]:
        """The untried replicas that can continue an answer."""
        candidates = self._fleet.candidates(exchange.model, exchange.tried)
        return [replica for replica in candidates if replica.is_weft and not replica.overflow]
