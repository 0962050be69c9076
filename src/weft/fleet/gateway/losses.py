"""Losses: upstreams that died with requests, and which of these requests another upstream may get."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from weft.engine.replicas.suspects import LOST, PATIENCE_S, Suspects, Trial
from weft.fleet.gateway.exchange import Exchange
from weft.fleet.upstreams.breaker import RetryBudget
from weft.fleet.upstreams.paths import is_repeatable
from weft.fleet.upstreams.replica import Attempt, UpstreamReplica
from weft.fleet.upstreams.upstream import ENGINE_RESTARTS, ResponseHead, UpstreamError, error_code
from weft.http.errors import CODE_HEADER, HttpError
from weft.logs import event_fields

log = logging.getLogger("weft.gateway")


class Losses:
    """Decides whether a request is sent again after its upstream died or stalled.

    A request may lose LOST upstreams, since it may be the cause of their deaths. So a body is sent to at most one other
    upstream, and the retry is taken from the `budget`, once for all requests that the dead upstream had. A request that
    loses its second upstream while there is no other suspect is refused for a while. `clock` reads monotonic seconds.
    """

    def __init__(self, budget: RetryBudget, clock: Callable[[], float]) -> None:
        self._budget, self._clock = budget, clock
        self._suspects = Suspects()

    def check(self, exchange: Exchange) -> None:
        """Raise HttpError 422 for a request that has ended two upstreams. Client libraries do not retry after 422."""
        left_s = self.refused_s(exchange)
        if left_s > 0:
            raise HttpError(
                422,
                f"{LOST} upstreams in a row died while they processed this request; it is "
                f"refused for {left_s:.0f} s; change it, or report its digest {exchange.digest.hex()}",
                code="request-ends-engines",
            )

    def refused_s(self, exchange: Exchange) -> float:
        """Seconds for which a request is still refused; 0 if it may be sent."""
        if not self._suspects or not exchange.digest:
            return 0.0
        return self._suspects.refused_s(exchange.digest, self._clock())

    # Suspects, one after another

    def free(self, exchange: Exchange, candidates: Sequence[UpstreamReplica], waited_s: float) -> list[UpstreamReplica]:
        """The candidates without another suspect, if the request is a suspect; after PATIENCE_S all candidates."""
        if not self._suspects or not exchange.digest or waited_s >= PATIENCE_S:
            return list(candidates)
        now = self._clock()
        return [one for one in candidates if self._suspects.may_begin(exchange.digest, one.name, now)]

    def begin(self, exchange: Exchange, attempt: Attempt) -> None:
        """Note that a request is about to be sent."""
        attempt.began_s = self._clock()
        if self._suspects and exchange.digest:
            trial = self._suspects.begin(exchange.digest, attempt.replica.name, attempt.began_s)
            attempt.trial = trial
            attempt.on_answer = lambda: self._suspects.end(trial)

    def note_answer(self, exchange: Exchange) -> None:
        """Note that a request has been answered to its end: it is not the cause of any death."""
        if self._suspects and exchange.digest:
            self._suspects.note_answer(exchange.digest)

    # Deaths

    def goes_on(self, exchange: Exchange, attempt: Attempt, error: UpstreamError) -> bool:
        """Count a failed attempt. Return True if another upstream may get the request."""
        return not error.sent or self._lose(exchange, attempt, is_death=error.died, dies_again=attempt.resent)

    def goes_on_after_restart(self, exchange: Exchange, attempt: Attempt) -> bool:
        """Count an engine whose death its server reports. Return True if another upstream may get the request."""
        return self._lose(exchange, attempt, is_death=True)

    def note_break(self, exchange: Exchange, attempt: Attempt, error: UpstreamError, *, progressed: bool) -> bool:
        """Count a stream that broke. Return True if another upstream may continue it.

        A request that got tokens from this upstream is no suspect, and this counts as the first upstream that it loses.
        """
        if progressed:
            exchange.lost_at = [attempt.replica]
            return True
        return self._lose(exchange, attempt, is_death=error.died)

    def _lose(self, exchange: Exchange, attempt: Attempt, *, is_death: bool, dies_again: bool = False) -> bool:
        exchange.lost_at += [attempt.replica] * (2 if dies_again else 1)
        must_pay = True
        if is_death:
            must_pay, was_proved = attempt.replica.note_death(attempt.began_s, self._clock())
            if was_proved:
                self._note_death(exchange, attempt)
        if len(exchange.lost_at) >= LOST or not is_repeatable(exchange.method, exchange.scope["path"]):
            return False
        return not must_pay or self._budget.spend()

    def _note_death(self, exchange: Exchange, attempt: Attempt) -> None:
        """Count the death of an upstream that has answered others: otherwise the upstream itself is at fault."""
        if not exchange.digest:
            return
        name = attempt.replica.name
        trial = attempt.trial or Trial(exchange.digest, name, attempt.began_s, suspected=False)
        if self._suspects.note_death(trial, self._clock()):
            log.error(
                "a request has ended %d upstreams in a row, the last one is %s; its digest is %s, and it is refused "
                "for %.0f s",
                LOST,
                name,
                exchange.digest.hex(),
                self.refused_s(exchange),
                extra=event_fields("request-ends-engines"),
            )


def tells_restart(head: ResponseHead, first: bytes) -> bool:
    """Return True for a Weft server's 503 about a request whose engine died."""
    if head.status != 503:
        return False
    if head.header(CODE_HEADER) == ENGINE_RESTARTS.encode():
        return True
    try:
        frame = msgspec.json.decode(first)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(frame, dict) and error_code(frame) == ENGINE_RESTARTS
