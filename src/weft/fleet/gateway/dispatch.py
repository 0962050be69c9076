"""Dispatcher: sends a request to replicas until one answers, and has another replica continue a broken answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from weft.fleet.gateway.accounts import DEFAULT_ANSWER, Accounts
from weft.fleet.gateway.answer import ResumableAnswer, StreamedAnswer, WholeAnswer
from weft.fleet.gateway.choice import POLL_S, SECOND_CHANCE_S, ReplicaChoice
from weft.fleet.gateway.completion import with_fields
from weft.fleet.gateway.exchange import OWNER_HEADER, ClientGoneError, Exchange, client_gone
from weft.fleet.gateway.losses import Losses, tells_restart
from weft.fleet.gateway.marked import MarkedAnswer
from weft.fleet.gateway.metrics import GatewayMetrics
from weft.fleet.upstreams.breaker import RetryBudget
from weft.fleet.upstreams.config import Objective, Timeouts
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.paths import is_repeatable
from weft.fleet.upstreams.replica import Attempt, UpstreamReplica
from weft.fleet.upstreams.upstream import ResponseHead, UpstreamError
from weft.http.errors import HttpError

log = logging.getLogger("weft.gateway")

RESUME_S = 30.0  # time in which a replica must be found that continues a broken answer


class Dispatcher:
    """Chooses replicas for requests, and reports the outcomes to breakers and metrics."""

    def __init__(
        self, fleet: Fleet, timeouts: Timeouts, metrics: GatewayMetrics, accounts: Accounts, objective: Objective
    ) -> None:
        self.fleet, self.timeouts, self.metrics = fleet, timeouts, metrics
        self.accounts = accounts
        self._budget = RetryBudget()
        self._losses = Losses(self._budget, lambda: fleet.clock())
        self._choice = ReplicaChoice(fleet, timeouts, accounts, objective, self._losses)

    # Before the first byte

    async def begin(self, exchange: Exchange) -> tuple[ResponseHead, bytes]:
        """Head and first piece of the response of the first replica that responds.

        At most TRIES replicas are tried, each once unless no replica could be reached. Raises HttpError if none is
        left, and ClientGoneError.
        """
        self._budget.earn()
        patience = self._choice.patience()
        failure: UpstreamError | None = None
        while candidates := await self._choice.next_candidates(exchange, patience):
            attempt = self._begin_attempt(exchange, candidates)
            self.accounts.reserve(exchange, attempt.replica)
            try:
                head, first = await self._ask(exchange, attempt, limit_s=patience.first_byte_s(self.fleet.clock()))
            except ClientGoneError:
                raise
            except UpstreamError as error:
                failure = error
                self.accounts.cancel(exchange, billed=error.sent)
                self._blame(attempt, error)
                if not self._losses.goes_on(exchange, attempt, error):
                    break
                continue
            reason = reason_to_retry(head, first)
            self._judge(attempt, head, reason)
            check_owner(exchange, head)
            if not reason or not self._may_retry(exchange, attempt, reason):
                return head, first
            if reason == "full":
                exchange.refusal = refusal_of(head)
            self.accounts.cancel(exchange, billed=False)
            attempt.close()
            self.metrics.count_retry(attempt.replica, reason)
        raise self._no_replica(exchange, failure)

    def _begin_attempt(self, exchange: Exchange, candidates: list[UpstreamReplica]) -> Attempt:
        attempt = exchange.begin_attempt(self._choice.choose_candidate(exchange, candidates))
        self._losses.begin(exchange, attempt)
        return attempt

    async def _ask(
        self, exchange: Exchange, attempt: Attempt, answered: list[int] | None = None, *, limit_s: float
    ) -> tuple[ResponseHead, bytes]:
        """Head and first piece of one replica's response. Raises UpstreamError."""
        replica = attempt.replica
        continuable = answered is not None or self._is_continuable(exchange, replica)
        body = self._body(exchange, replica, continuable, answered)
        head = await attempt.request(
            exchange.method,
            exchange.head(replica, len(body)),
            body,
            connect_s=self.timeouts.connect,
            first_byte_s=limit_s,
        )
        first = await attempt.read_piece()
        if answered is None:
            exchange.answer = self._answer(exchange, replica, head, continuable)
        if exchange.answer is None:
            attempt.note_token()
        attempt.note_begun(self.timeouts.idle, movable=continuable and exchange.answer is not None)
        return head, first

    def _is_continuable(self, exchange: Exchange, replica: UpstreamReplica) -> bool:
        """Return True if another replica could continue this answer; it may also be added while the answer runs."""
        completion = exchange.completion
        return completion is not None and completion.streams and completion.single and replica.is_weft

    def _body(
        self, exchange: Exchange, replica: UpstreamReplica, continuable: bool, answered: list[int] | None
    ) -> bytes:
        """The request's body for a replica."""
        changes: dict[str, Any] = {}
        own_name = replica.own_name(exchange.model)
        # Readers of a body that names two models may disagree: a key that is limited to a model sends a body with one
        # name.
        if own_name != exchange.model or (exchange.model and exchange.client.models is not None):
            changes["model"] = own_name
        completion = exchange.completion
        if completion is not None:
            if continuable:
                events = exchange.answer.sent_events if isinstance(exchange.answer, ResumableAnswer) else 0
                changes |= completion.token_fields(answered, events)
            if exchange.metered:
                changes |= completion.usage_fields()
            if replica.overflow:  # at most the reserved tokens
                most = completion.max_tokens or DEFAULT_ANSWER
                changes |= completion.limit_fields(most, replica.config.limit_field)
        return with_fields(exchange.body, changes, rewrites=replica.overflow) if changes else exchange.body

    def _answer(
        self, exchange: Exchange, replica: UpstreamReplica, head: ResponseHead, continuable: bool
    ) -> ResumableAnswer | WholeAnswer | None:
        """The object that reads a response on its way; None if the gateway need not read it."""
        completion = exchange.completion
        if completion is None:
            return None
        alias = exchange.model if replica.own_name(exchange.model) != exchange.model else None
        if not continuable and alias is None and not exchange.metered:
            return None
        if head.status != 200 or head.header(b"content-encoding"):
            return None
        api = completion.api
        if not (head.is_line_stream if api is not None and api.lines else head.is_event_stream):
            return WholeAnswer(alias, api)
        if api is not None:
            return MarkedAnswer(
                api,
                continuable=continuable,
                keeps_marks=completion.keeps_ids,
                model=alias,
                reads_usage=exchange.metered,
                begun=completion.begun,
            )
        return StreamedAnswer(
            continuable=continuable,
            keeps_ids=completion.keeps_ids,
            keeps_usage=completion.keeps_usage,
            model=alias,
            begun=completion.begun,
        )

    def _may_retry(self, exchange: Exchange, attempt: Attempt, reason: str) -> bool:
        """Return True if another replica may be tried. Every retry after 5xx is taken from the budget."""
        if reason == "died":
            return self._losses.goes_on_after_restart(exchange, attempt) and bool(self._choice.candidates(exchange))
        if not self._choice.candidates(exchange):
            return False
        if reason == "full":
            return True
        return is_repeatable(exchange.method, exchange.scope["path"]) and self._budget.spend()

    def _judge(self, attempt: Attempt, head: ResponseHead, reason: str) -> None:
        """Report to the breaker a response that has begun. A full replica is not unhealthy."""
        if reason == "5xx":
            attempt.fail(self.fleet.clock(), f"status {head.status}")
        elif not attempt.replica.breaker.closed:
            attempt.succeed(self.fleet.clock())  # the end of a response may be hours away

    def _blame(self, attempt: Attempt, error: UpstreamError) -> None:
        """Count a failure of a replica and end the attempt."""
        attempt.fail(self.fleet.clock(), str(error))
        attempt.close()
        self.metrics.count_retry(attempt.replica, error.code)

    @staticmethod
    def _no_replica(exchange: Exchange, failure: UpstreamError | None) -> HttpError:
        """The error for a request that no replica answered; a full replica's refusal is preferred."""
        if exchange.refusal is not None:
            return exchange.refusal
        if failure is None:
            return HttpError(
                503, "no upstream can take requests now; try again later", code="no-upstream", retry_after_s=1
            )
        status = 504 if failure.stalled else 502
        log.warning("no upstream answered; the last one, %s: %s", exchange.upstream, failure)
        return HttpError(status, f"no upstream answered; the last one: {failure.public}", code=failure.code)

    # After it

    def note_answer(self, exchange: Exchange) -> None:
        """Note that a request has been answered to its end."""
        self._losses.note_answer(exchange)

    async def resume(self, exchange: Exchange, answer: ResumableAnswer, broken: UpstreamError) -> bytes:
        """First piece of another replica's continuation of a broken answer.

        Raises `broken` if no replica continues it within RESUME_S, and ClientGoneError.
        """
        assert exchange.attempt is not None
        broken.upstream = exchange.upstream
        self._blame(exchange.attempt, broken)
        if not self._losses.note_break(exchange, exchange.attempt, broken, progressed=answer.progressed):
            raise broken
        if answer.progressed:
            del exchange.tried[:-1]
        if not any(other is not exchange.attempt.replica for other in self.fleet.continuing(exchange.model)):
            raise broken  # it was the only one
        answered = answer.resume()
        began = self.fleet.clock()
        while (now := self.fleet.clock()) < began + RESUME_S and not self._losses.refused_s(exchange):
            if exchange.gone:
                raise client_gone()
            candidates = self._choice.continuing(exchange)
            if free := self._losses.free(exchange, candidates, now - began):
                first = await self._continue_at(exchange, answer, answered, self._begin_attempt(exchange, free), broken)
                if first is not None:
                    return first
                continue
            if not candidates and now > began + SECOND_CHANCE_S:
                exchange.tried.clear()
            await asyncio.sleep(POLL_S)
        raise broken

    async def _continue_at(
        self, exchange: Exchange, answer: ResumableAnswer, answered: list[int], attempt: Attempt, broken: UpstreamError
    ) -> bytes | None:
        """First piece of a replica's continuation of an answer; None if it fails and another replica may be tried.

        Raises `broken` if no other replica may be tried, and ClientGoneError.
        """
        try:
            head, first = await self._ask(exchange, attempt, answered, limit_s=self.timeouts.first_byte)
        except ClientGoneError:
            raise
        except UpstreamError as error:
            self._blame(attempt, error)
            if not self._losses.goes_on(exchange, attempt, error):
                raise broken from None
            return None
        reason = reason_to_retry(head, first)
        self._judge(attempt, head, reason)
        if answer.fits(head):
            self.metrics.count_continued(attempt.replica)
            return first
        attempt.close()
        self.metrics.count_retry(attempt.replica, reason or "refused")
        if reason == "died":
            goes_on = self._losses.goes_on_after_restart(exchange, attempt)
        else:
            goes_on = head.status >= 500 or head.status == 429  # else another replica would refuse it too
        if not goes_on:
            raise broken
        return None


def check_owner(exchange: Exchange, head: ResponseHead) -> None:
    """Raise HttpError 502 if the upstream did not confirm X-Weft-Owner, and so does not separate files per key."""
    if exchange.owner and head.status < 300 and not head.header(OWNER_HEADER):
        raise HttpError(
            502,
            "the upstream did not confirm X-Weft-Owner, so it does not separate files per key; "
            "it needs this version of Weft",
            code="owner-not-heeded",
        )


def reason_to_retry(head: ResponseHead, first: bytes) -> str:
    """The reason to try another replica: "full", "died" or "5xx"; "" without a reason."""
    if head.status < 429:
        return ""
    if tells_restart(head, first):
        return "died"
    if head.status == 429 or (head.status == 503 and head.header(b"retry-after")):
        return "full"
    return "5xx" if head.status >= 500 else ""


def refusal_of(head: ResponseHead) -> HttpError:
    """The response of a full replica, which is sent if all others fail."""
    after = head.header(b"retry-after").decode("latin-1")
    return HttpError(
        head.status,
        "the upstreams that answer are full; try again later",
        code="upstream-full",
        retry_after_s=int(after) if after.isdecimal() and len(after) < 7 else 1,
    )
