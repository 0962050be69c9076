"""Keeper: loads, wakes, puts to sleep and unloads models as `Residency` decides, and restarts failed models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from weft.errors import WeftError
from weft.fleet.hosting.hosted import HealthChecks, Hosted
from weft.fleet.hosting.member import Member
from weft.fleet.hosting.residency import PlacementDecision, Residency, State
from weft.fleet.hosting.set_plan import ModelPlan
from weft.fleet.upstreams.checks import read_models
from weft.fleet.upstreams.config import Timeouts
from weft.fleet.upstreams.fleet import Fleet
from weft.http.errors import HttpError

log = logging.getLogger("weft.hosting")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0  # before a failed model is started again
LOAD_TIMEOUT_S = 300.0  # longest wait of a request for its model, as Ollama's OLLAMA_LOAD_TIMEOUT
TICK_S, LATE_TICK_S = 0.5, 3.0  # between two rounds of `run`; a longer time between two rounds is not counted in full
SETTLE_POLL_S = 0.02  # between two checks for the end of a model's requests
GONE_POLL_S = 0.2  # between two checks for a disconnected client


class Keeper:
    """All models of the set. Everything runs in one event loop; `pump` is called after every change."""

    def __init__(
        self,
        residency: Residency,
        fleet: Fleet,
        create_member: Callable[[str, Sequence[str]], Member],
        clock: Callable[[], float] = time.monotonic,
        argv: Sequence[str] = (),
    ) -> None:
        """`create_member` gets the names of a model; `argv`: the flags of all processes."""
        self.residency, self.fleet, self.clock = residency, fleet, clock
        self.models: dict[str, Hosted] = {}
        self._create_member, self._argv = create_member, tuple(argv)
        self._tasks: set[asyncio.Task[None]] = set()
        self._order: list[str] = []  # models that should be awake, in order of request
        self._closed = False
        self._checks = HealthChecks(self.models, residency, clock, self._spawn)
        self.started = False  # the models that begin with the set have been loaded

    def add(self, plan: ModelPlan) -> Hosted:
        """Register a model; it starts unloaded."""
        name = plan.entry.name
        member = self._create_member(name, plan.entry.names)
        self.models[name] = hosted = Hosted(plan, member, [*self._argv, *plan.argv])
        self.residency.tenants.setdefault(name, plan.tenant)
        self.fleet.replicas[member.replica.name] = member.replica
        return hosted

    # Requests and commands of the administrator

    @contextlib.asynccontextmanager
    async def lease(
        self,
        name: str,
        *,
        keep_alive_s: float | None = None,
        gone: Callable[[], bool] = lambda: False,
        limit_s: float = LOAD_TIMEOUT_S,
    ) -> AsyncIterator[Hosted]:
        """Keep a model awake, once it is, during the block and for `keep_alive_s` after it (None: as configured).

        Raises HttpError 503 if it is down or not awake within `limit_s`, and PlanError if it does not fit.
        """
        hosted, tenant = self.models[name], self.residency.tenants[name]
        if tenant.state is not State.AWAKE or tenant.ends_turn:
            await self._wait(hosted, gone, limit_s)
        else:
            tenant.running += 1
        try:
            yield hosted
        finally:
            tenant.running -= 1
            tenant.used_s, tenant.stays_s = self.clock(), keep_alive_s
            if not tenant.running:
                self.pump()

    async def _wait(self, hosted: Hosted, gone: Callable[[], bool], limit_s: float) -> None:
        """Wait until the model is awake; the request then counts as running."""
        if self._closed:
            raise _shutting_down()
        name, waiter = hosted.plan.entry.name, asyncio.get_running_loop().create_future()
        hosted.waiters.append(waiter)
        self._want(name)
        ends_s = self.clock() + limit_s
        try:
            while not waiter.done():
                await asyncio.wait([waiter], timeout=GONE_POLL_S)
                if waiter.done():
                    break
                if gone():
                    raise HttpError(499, "the client has closed its connection", code="client-gone")
                if self.clock() > ends_s:
                    state = self.residency.tenants[name].state.value
                    raise HttpError(
                        503,
                        f"{name!r} was not awake within {limit_s:g} s, it is {state}; try again later",
                        code="model-not-ready",
                        retry_after_s=5,
                    )
            waiter.result()
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.residency.tenants[name].running -= 1  # the lease was granted as the client gave up
            elif waiter in hosted.waiters:
                hosted.waiters.remove(waiter)
            self.pump()
            raise

    async def wake(self, name: str) -> None:
        """Load or wake a model, even if it is down. Raises HttpError and PlanError."""
        hosted = self.models[name]
        hosted.failures, hosted.fault, hosted.again_s = 0, None, -math.inf
        async with self.lease(name):
            pass

    async def sleep_or_unload(self, name: str, *, unload: bool, limit_s: float = LOAD_TIMEOUT_S) -> None:
        """Put a model to sleep, or unload it, after its running requests. New requests wait, and wake it again.

        Raises HttpError 409 if the running requests have not ended within `limit_s`, and 502 if its process refuses.
        """
        hosted, tenant = self.models[name], self.residency.tenants[name]
        resting = (State.UNLOADED,) if unload else (State.UNLOADED, State.ASLEEP)
        ends_s = self.clock() + limit_s
        tenant.leaves = tenant.ends_turn = True
        try:
            while tenant.running or tenant.state not in (State.AWAKE, State.ASLEEP, State.UNLOADED):
                if self.clock() > ends_s:
                    raise HttpError(
                        409,
                        f"{name!r} is {tenant.state.value} with {tenant.running} running requests; try again later",
                        code="model-busy",
                        retry_after_s=1,
                    )
                await asyncio.sleep(SETTLE_POLL_S)
        finally:
            tenant.leaves = tenant.ends_turn = False
        hosted.wanted, hosted.due, failures = False, False, hosted.failures
        if tenant.state not in resting:
            await self._begin_rest(name, unload=unload)
        if hosted.failures > failures and hosted.fault is not None:
            raise hosted.fault

    def note_answered(self, name: str) -> None:
        """Note that a model has answered a request: earlier failures do not count any more."""
        self.models[name].failures = 0

    def fault_of(self, name: str) -> str:
        """The reason why a model that should answer does not; "" if it does, or need not answer."""
        hosted, state = self.models[name], self.residency.tenants[name].state
        if hosted.down:
            return f"{name!r} is down: {hosted.fault}"
        if state is State.AWAKE:
            return f"{name!r}: {hosted.engine_fault}" if hosted.engine_fault else ""
        if not hosted.due:
            return ""
        cause = f": {hosted.fault}" if hosted.failures else ""
        return f"{name!r} is {state.value}{cause}"

    # Changes

    def _want(self, name: str) -> None:
        if name not in self._order:
            self._order.append(name)
        self.pump()

    def pump(self) -> None:
        """Begin all changes that can begin now, and release requests whose models are awake."""
        if self._closed:
            return
        now = self.clock()
        self._release()  # first, so that a model that was just woken answers requests before it sleeps again
        for tenant in self.residency.tenants.values():
            tenant.ends_turn = tenant.leaves
        blocked: set[str] = set()
        for name in tuple(self._order):
            hosted, tenant = self.models[name], self.residency.tenants[name]
            if not (hosted.waiters or hosted.wanted):
                self._order.remove(name)  # an awake model may be ending its turn while requests wait
            elif tenant.state in (State.UNLOADED, State.ASLEEP) and (hosted.down or now >= hosted.again_s):
                self._make_room(hosted, now, blocked)
        for name in self.residency.expired(now):
            self._begin_rest(name, unload=not self.residency.may_sleep(name))
        self._release()

    def _make_room(self, hosted: Hosted, now: float, blocked: set[str]) -> None:
        """Begin to load or wake a model, or to free memory for it; while it waits, its devices are blocked."""
        name, devices = hosted.plan.entry.name, {*hosted.plan.need.awake}
        if devices & blocked:
            return
        if hosted.down:
            self._refuse(hosted, hosted.fault or HttpError(503, f"{name!r} is down", code="model-down"))
            return
        try:
            decision = self.residency.decide_placement(name, now)
        except WeftError as error:
            self._refuse(hosted, error)
            return
        if decision.ready:
            tenant = self.residency.tenants[name]
            tenant.state = State.LOADING if tenant.state is State.UNLOADED else State.WAKING
            self._spawn(self._bring_up(hosted, tenant.state is State.LOADING))
            return
        blocked |= devices
        self._apply(decision)

    def _apply(self, decision: PlacementDecision) -> None:
        """Put models to sleep and unload models as decided."""
        for name in decision.waits_for:
            self.residency.tenants[name].ends_turn = True
        for name in (*decision.sleepers, *decision.leavers):
            self._begin_rest(name, unload=name in decision.leavers)

    def _release(self) -> None:
        """Release the requests whose models are awake."""
        for name, hosted in self.models.items():
            tenant = self.residency.tenants[name]
            if tenant.state is State.AWAKE and not tenant.ends_turn:
                waiting, hosted.waiters = hosted.waiters, []
                for waiter in waiting:
                    if not waiter.done():
                        tenant.running += 1
                        waiter.set_result(None)

    @staticmethod
    def _refuse(hosted: Hosted, error: Exception) -> None:
        """End the requests that wait for a model."""
        hosted.wanted = False
        waiting, hosted.waiters = hosted.waiters, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)

    async def _bring_up(self, hosted: Hosted, load: bool) -> None:
        """Load a model, or wake it."""
        entry, tenant, began = hosted.plan.entry, self.residency.tenants[hosted.plan.entry.name], self.clock()
        hosted.answered_s, hosted.engine_fault = began, ""
        try:
            if load:
                await hosted.member.start(entry.config.model, hosted.argv)
                hosted.load_s = self.clock() - began
                await read_models(hosted.member.replica, Timeouts())
                hosted.watch = self._spawn(self._watch(hosted))
            else:
                await hosted.member.post_admin("/wake_up")
                hosted.wake_s = self.clock() - began
        except Exception as error:
            if load or hosted.member.is_running:
                await self._fail(hosted, _as_refusal(entry.name, error))
            return
        now = self.clock()
        log.info("%s %s (%.2f s)", entry.name, "is loaded" if load else "is awake", now - began)
        tenant.state, tenant.woken_s, tenant.used_s = State.AWAKE, now, now
        hosted.wanted, hosted.member.replica.draining = False, False
        hosted.due = entry.must_be_awake
        self.pump()

    def _begin_rest(self, name: str, *, unload: bool) -> asyncio.Task[None]:
        """Begin to put an idle model to sleep, or to unload it."""
        hosted, tenant = self.models[name], self.residency.tenants[name]
        tenant.state = State.UNLOADING if unload else State.SLEEPING
        tenant.slept = tenant.slept or not unload
        hosted.member.replica.draining = True
        return self._spawn(self._rest(hosted, unload=unload))

    async def _rest(self, hosted: Hosted, *, unload: bool) -> None:
        name = hosted.plan.entry.name
        tenant = self.residency.tenants[name]
        try:
            if unload:
                await hosted.stop()
            else:
                await hosted.member.post_admin("/sleep?level=1")
        except Exception as error:
            if unload or hosted.member.is_running:
                await self._fail(hosted, _as_refusal(name, error))
            return  # `_watch` handles a process that has ended
        tenant.state, tenant.slept = (State.UNLOADED, False) if unload else (State.ASLEEP, True)
        log.info("%s is %s", name, tenant.state.value)
        self.pump()

    async def _watch(self, hosted: Hosted) -> None:
        """Wait for the end of a model's process. It is unexpected, so the model has failed."""
        await hosted.member.wait_ended()
        if not self._closed:
            await self._fail(hosted, hosted.member.exit_error())

    async def _fail(self, hosted: Hosted, error: HttpError) -> None:
        """Note a failure. The model starts again after a pause, unless it has failed FAILURES times in a row."""
        if self._closed:
            return
        name = hosted.plan.entry.name
        tenant = self.residency.tenants[name]
        hosted.member.replica.draining = True
        tenant.state = State.UNLOADING
        try:
            await hosted.stop()
        except Exception:
            log.exception("the process of %s may not have ended", name)
        tenant.state, tenant.slept = State.UNLOADED, False
        hosted.failures += 1
        hosted.fault = error
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**hosted.failures)
        hosted.again_s = self.clock() + pause_s
        if hosted.down:
            log.error("%s stays down after %d failures in a row: %s", name, hosted.failures, error)
            self._refuse(hosted, error)
        else:
            log.error("%s; it may start again in %.1f s", error, pause_s)
            hosted.wanted = hosted.plan.entry.must_be_awake
            if hosted.wanted or hosted.waiters:
                self._want(name)
        self.pump()

    # The life of the set

    async def start(self, names: Sequence[str]) -> None:
        """Load models one after another, since each measures the free memory. A failure is logged."""
        for name in names:
            hosted = self.models[name]
            hosted.wanted, hosted.due = True, hosted.plan.entry.must_be_awake
        for name in names:
            try:
                await self.wake(name)
            except WeftError as error:
                log.error("%s is not loaded: %s", name, error)
        self.started = True

    async def tick_forever(self) -> None:
        """Apply keep-alives and check the health of all models, until it is cancelled."""
        logged = ""
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            try:
                self._checks.discount_suspension(time.monotonic() - began - LATE_TICK_S)
                self.pump()
                self._checks.begin()
            except Exception as error:  # a bug: without further rounds no model would sleep or start
                if repr(error) != logged:
                    logged = repr(error)
                    log.exception("a look at the models failed; they go on")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In a new context, so that its log lines do not carry the id of the request that started it.
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fault of ours about the models", exc_info=error)

    def drain(self) -> None:
        """Refuse requests that wait for a model, and ask all processes to end once their running requests have."""
        self._closed = True
        for hosted in self.models.values():
            self._refuse(hosted, _shutting_down())
            hosted.member.terminate()

    async def close(self) -> None:
        """End all processes."""
        self.drain()
        await asyncio.gather(*(hosted.member.close() for hosted in self.models.values()), return_exceptions=True)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _shutting_down() -> HttpError:
    return HttpError(503, "the server is shutting down", code="shutting-down", retry_after_s=1)


def _as_refusal(name: str, error: Exception) -> HttpError:
    """The error for the requests that wait for a model; an unexpected exception is logged with its stack."""
    if isinstance(error, HttpError):
        return error
    log.error("a fault of ours about %s", name, exc_info=error)
    return HttpError(503, f"{name!r} does not run: {error!r:.200}", code="model-down", retry_after_s=5)
