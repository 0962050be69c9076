"""The keeper of several models, over processes that only note what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.refusals import refuses
from weft.config import EngineConfig
from weft.errors import PlanError
from weft.fleet.hosting import hosted
from weft.fleet.hosting import keeper as keepers
from weft.fleet.hosting.catalogue import SetFleet
from weft.fleet.hosting.hosted import FAILURES
from weft.fleet.hosting.keeper import Keeper
from weft.fleet.hosting.model_set import ModelEntry
from weft.fleet.hosting.residency import TURN_S, Need, Residency, State
from weft.fleet.hosting.set_plan import ModelPlan
from weft.fleet.upstreams.policy import POLICIES
from weft.fleet.upstreams.upstream import UpstreamError
from weft.http.errors import HttpError
from weft.logs import request_id

PATIENCE_S = 60.0


class FakeMember:
    """A process that starts, obeys and ends at once; `told` is what it was told."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name, self.told, self.is_running, self.broken = name, list[str](), False, False
        self.logged_as = "nobody"
        self.fault: Exception | None = None  # of the next start
        self.health, self.responds, self.is_suspended = "", asyncio.Event(), False
        self.responds.set()
        self.replica = SimpleNamespace(name=name, draining=True, listed=None)
        self.gate = asyncio.Event()
        self.gate.set()
        self._ended = asyncio.Event()

    async def start(self, model: str, arguments: Sequence[str]) -> None:
        self.told.append("start")
        self.logged_as = request_id.get()
        self.is_running, self._ended = True, asyncio.Event()
        either = [asyncio.create_task(event.wait()) for event in (self.gate, self._ended)]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if self.broken or not self.is_running:
            self.kill()
            raise self.exit_error()

    async def post_admin(self, path: str) -> None:
        self.told.append(path)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def exit_error(self) -> HttpError:
        return HttpError(503, f"{self.name!r} does not run: {self.reason}", code="model-down")

    async def ask_health(self, limit_s: float) -> str:
        if not self.responds.is_set():
            await asyncio.sleep(0)
            raise UpstreamError("no response", code="check-timeout")
        return self.health

    reason = "no cause"

    def kill(self, reason: str = "no cause") -> None:
        self.is_running, self.reason, self.is_suspended = False, reason, False
        self.responds.set()
        self._ended.set()

    def terminate(self) -> None:
        self.told.append("terminate")

    async def stop(self) -> None:
        self.told.append("stop")
        self.kill()

    async def close(self) -> None:
        await self.stop()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def keeping(
    monkeypatch: pytest.MonkeyPatch, room: int, **models: dict[str, Any]
) -> AsyncIterator[tuple[Keeper, dict[str, FakeMember], Clock]]:
    """A keeper of models that take 10 bytes awake and 1 asleep."""

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(keepers, "read_models", nothing)
    clock = Clock()
    fleet = SetFleet([], POLICIES["least_conn"](), clock)
    keeper = Keeper(Residency({"cpu": room}), fleet, FakeMember, clock)  # type: ignore[arg-type]
    for name, fields in models.items():
        entry = ModelEntry(names=(name,), config=EngineConfig(model=name), **fields)
        need = Need({"cpu": 10}, {"cpu": 1})
        keeper.add(ModelPlan(entry=entry, devices=("cpu",), need=need, weight_bytes=9, kv_bytes=1, wake_s=0.1))
    ticking = asyncio.create_task(keeper.tick_forever())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield keeper, {name: hosted.member for name, hosted in keeper.models.items()}, clock  # type: ignore[misc]
    finally:
        ticking.cancel()
        await keeper.close()


async def until(check: Any) -> None:
    while not check():
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK_S", "GONE_POLL_S"):
        monkeypatch.setattr(keepers, name, 0.01)
    monkeypatch.setattr(hosted, "CHECK_EVERY_S", 0.0)


async def ask(keeper: Keeper, name: str, **fields: Any) -> None:
    async with keeper.lease(name, **fields):
        pass


async def test_a_request_loads_its_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"keep_alive_s": 60.0}) as (keeper, members, _):
        request_id.set("first")
        await asyncio.gather(*(ask(keeper, "one") for _ in range(20)))
        assert members["one"].told == ["start"]
        assert members["one"].logged_as == "", "it outlives the request that loads it"
        assert keeper.residency.tenants["one"].running == 0


async def test_the_one_used_before_sleeps_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"one": {"keep_alive_s": 60.0}, "two": {"keep_alive_s": 60.0}}
    async with keeping(monkeypatch, 12, **models) as (keeper, members, clock):
        await ask(keeper, "one")
        clock.now += 1
        await ask(keeper, "two")
        assert members["one"].told == ["start", "/sleep?level=1"]
        assert members["one"].replica.draining
        clock.now += 1
        await ask(keeper, "one")
        assert members["one"].told == ["start", "/sleep?level=1", "/wake_up"]
        assert members["two"].told == ["start", "/sleep?level=1"]
        assert keeper.residency.held("cpu") == 11


async def test_the_keeper_knows_who_has_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"keep_alive_s": 60.0}) as (keeper, _, _clock):
        tenant = keeper.residency.tenants["one"]
        await ask(keeper, "one")
        assert not tenant.slept
        await keeper.sleep_or_unload("one", unload=False)
        await ask(keeper, "one")
        assert tenant.slept
        assert tenant.state is State.AWAKE
        await keeper.sleep_or_unload("one", unload=True)
        assert not tenant.slept


async def test_under_load_two_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to both without a pause, and room for one: nobody fails, both are answered."""
    models = {"one": {"keep_alive_s": 60.0}, "two": {"keep_alive_s": 60.0}}
    async with keeping(monkeypatch, 12, **models) as (keeper, members, clock):
        answered = {"one": 0, "two": 0}

        async def client(name: str) -> None:
            while min(answered.values()) < 30:
                async with keeper.lease(name):
                    assert keeper.residency.tenants[name].state is State.AWAKE
                    await asyncio.sleep(0.001)
                    clock.now += TURN_S / 50
                answered[name] += 1

        await asyncio.gather(*(client(name) for name in ("one", "two") for _ in range(3)))
        sleeps = members["one"].told.count("/sleep?level=1")
        assert sleeps
        assert sleeps <= answered["one"] / 3, "it takes turns, not each request"


async def test_room_that_busy_models_hold_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"one": {"keep_alive_s": 60.0}, "two": {"keep_alive_s": 60.0}}
    async with keeping(monkeypatch, 12, **models) as (keeper, members, clock):
        async with keeper.lease("one"):
            clock.now += TURN_S + 1
            waiting = asyncio.create_task(ask(keeper, "two"))
            await until(lambda: keeper.residency.tenants["one"].ends_turn)
            late = asyncio.create_task(ask(keeper, "one"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            assert not late.done(), "the turn of one ends"
            assert "/sleep?level=1" not in members["one"].told
        await waiting
        await late
        assert members["one"].told == ["start", "/sleep?level=1", "/wake_up"]


async def test_time_awake_is_the_last_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"keep_alive_s": 60.0}) as (keeper, _, clock):
        await ask(keeper, "one")
        clock.now += 59
        await asyncio.sleep(0.05)
        assert keeper.residency.tenants["one"].state is State.AWAKE
        clock.now += 1
        await until(lambda: keeper.residency.tenants["one"].state is State.ASLEEP)
        await ask(keeper, "one", keep_alive_s=0.0)
        await until(lambda: keeper.residency.tenants["one"].state is State.ASLEEP)
        await ask(keeper, "one", keep_alive_s=float("inf"))
        clock.now += 1e6
        await asyncio.sleep(0.05)
        assert keeper.residency.tenants["one"].state is State.AWAKE


async def test_a_model_that_must_be_awake_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={}, two={}) as (keeper, members, clock):
        await keeper.start(["one", "two"])
        members["one"].kill()
        await until(lambda: keeper.models["one"].failures == 1)
        assert keeper.residency.tenants["two"].state is State.AWAKE
        clock.now += 60
        await until(lambda: keeper.residency.tenants["one"].state is State.AWAKE)
        assert members["one"].told.count("start") == 2
        assert members["two"].told == ["start"]
        keeper.note_answered("one")
        assert keeper.models["one"].failures == 0


async def test_after_failures_in_a_row_it_stays_down_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={}, two={}) as (keeper, members, clock):
        members["one"].broken = True
        starting = asyncio.create_task(keeper.start(["one", "two"]))
        while not starting.done():
            clock.now += 1
            await asyncio.sleep(0.01)
        assert members["one"].told.count("start") == FAILURES
        with refuses(HttpError, "model-down", "'one'", "no cause"):
            await ask(keeper, "one")
        await ask(keeper, "two")
        members["one"].broken = False
        await keeper.wake("one")
        await ask(keeper, "one")


async def test_no_room_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 12, one={}, two={"keep_alive_s": 60.0}) as (keeper, _, __):
        await ask(keeper, "one")
        with refuses(PlanError, "no-room-for-model", "'two'", "10 bytes of cpu", "12"):
            await ask(keeper, "two")
        assert keeper.residency.tenants["two"].running == 0


async def test_a_client_that_goes_and_one_that_waits_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"keep_alive_s": 60.0}) as (keeper, members, clock):
        members["one"].gate.clear()
        with refuses(HttpError, "client-gone"):
            await ask(keeper, "one", gone=lambda: True)
        waiting = asyncio.create_task(ask(keeper, "one", limit_s=5.0))
        await asyncio.sleep(0.03)
        clock.now += 6
        with refuses(HttpError, "model-not-ready", "'one'", "5 s", "loading"):
            await waiting
        members["one"].gate.set()
        await ask(keeper, "one")
        assert keeper.residency.tenants["one"].running == 0


async def test_commands_of_an_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={}) as (keeper, members, _):
        await keeper.wake("one")
        async with keeper.lease("one"):
            with refuses(HttpError, "model-busy", "'one'", "awake", "1"):
                await keeper.sleep_or_unload("one", unload=False, limit_s=-1.0)
            sleeping = asyncio.create_task(keeper.sleep_or_unload("one", unload=False))
            await asyncio.sleep(0.05)
            late = asyncio.create_task(ask(keeper, "one"))
            await asyncio.sleep(0.05)
            assert not sleeping.done()
            assert not late.done()
        await sleeping
        await late
        assert members["one"].told == ["start", "/sleep?level=1", "/wake_up"]
        del members["one"].told[1:]
        await keeper.sleep_or_unload("one", unload=False)
        await keeper.sleep_or_unload("one", unload=False)
        assert keeper.residency.tenants["one"].state is State.ASLEEP
        await keeper.sleep_or_unload("one", unload=True)
        assert keeper.residency.tenants["one"].state is State.UNLOADED
        assert members["one"].told == ["start", "/sleep?level=1", "stop"]
        assert keeper.models["one"].failures == 0


async def test_an_engine_that_starts_again_is_left_alone_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={}) as (keeper, members, clock):
        await keeper.start(["one"])
        assert keeper.fault_of("one") == ""
        members["one"].health = "the engine starts again"
        await until(lambda: keeper.fault_of("one"))
        assert "the engine starts again" in keeper.fault_of("one")
        clock.now += 1000
        await asyncio.sleep(0.05)
        assert members["one"].told == ["start"], "its own restart is faster than a cold start"
        members["one"].health = ""
        await until(lambda: not keeper.fault_of("one"))


async def test_a_process_that_does_not_respond_is_killed_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"flags": ("--progress-timeout=3",)}, two={}) as (keeper, members, clock):
        await keeper.start(["one", "two"])
        for member in members.values():
            member.responds.clear()
        clock.now += 2.5
        await asyncio.sleep(0.05)
        assert members["one"].is_running
        clock.now += 1
        await until(lambda: keeper.models["one"].failures)
        assert "3.5 s" in keeper.fault_of("one")
        assert members["two"].is_running, "its limit is that of the set"
        clock.now += 60
        await until(lambda: members["one"].told.count("start") == 2)


async def test_time_in_which_the_keeper_itself_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container is paused, with all models in it: when it goes on, responses to the looks are not read yet."""
    async with keeping(monkeypatch, 100, one={}) as (keeper, members, clock):
        await keeper.start(["one"])
        over = asyncio.Event()

        async def time_out(limit_s: float) -> str:
            await over.wait()
            raise UpstreamError("no response", code="check-timeout")

        monkeypatch.setattr(keepers, "time", SimpleNamespace(monotonic=clock))
        monkeypatch.setattr(members["one"], "ask_health", time_out)
        await asyncio.sleep(0.03)
        clock.now += 1000
        await asyncio.sleep(0.05)
        over.set()
        await asyncio.sleep(0.05)
        assert members["one"].told == ["start"] and members["one"].is_running


async def test_a_process_that_is_stopped_while_it_loads_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"keep_alive_s": 60.0}) as (keeper, members, clock):
        members["one"].gate.clear()
        asking = asyncio.create_task(ask(keeper, "one"))
        await until(lambda: members["one"].is_running)
        clock.now += 100
        await asyncio.sleep(0.05)
        assert members["one"].is_running, "to load may take long"
        members["one"].is_suspended = True
        clock.now += 100
        await until(lambda: keeper.models["one"].failures)
        members["one"].gate.set()
        clock.now += 60
        await asking
        assert members["one"].told.count("start") == 2


async def test_a_look_that_waits_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"one": {"keep_alive_s": 60.0}, "two": {"keep_alive_s": 60.0}}
    async with keeping(monkeypatch, 100, **models) as (keeper, members, clock):
        monkeypatch.setattr(members["one"], "ask_health", lambda limit_s: asyncio.Event().wait())
        await ask(keeper, "one")
        await ask(keeper, "two")
        await asyncio.sleep(0.03)
        clock.now += 61
        await until(lambda: keeper.residency.tenants["two"].state is State.ASLEEP)


@pytest.mark.parametrize("fault", [OSError("no process left"), BrokenPipeError(), RuntimeError("a fault of ours")])
async def test_no_fault_of_a_start_leaves_a_model_loading(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    async with keeping(monkeypatch, 100, one={}) as (keeper, members, clock):
        members["one"].fault = fault
        waiting = asyncio.create_task(ask(keeper, "one"))
        await until(lambda: keeper.models["one"].failures == 1)
        assert keeper.residency.tenants["one"].state is State.UNLOADED
        clock.now += 60
        await waiting


async def test_a_fault_of_a_look_does_not_end_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={"keep_alive_s": 60.0}) as (keeper, _, clock):
        await ask(keeper, "one")
        whole, failed = keeper.residency.expired, list[float]()

        def fails_once(now: float) -> list[str]:
            if not failed:
                failed.append(now)
                raise RuntimeError("a fault of ours")
            return whole(now)

        monkeypatch.setattr(keeper.residency, "expired", fails_once)
        clock.now += 60
        await until(lambda: keeper.residency.tenants["one"].state is State.ASLEEP)
        assert failed


async def test_health_tells_of_models_that_must_be_awake_and_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    models: dict[str, Any] = {"one": {}, "two": {"keep_alive_s": 60.0}}
    async with keeping(monkeypatch, 100, **models) as (keeper, members, clock):
        await keeper.start(["one", "two"])
        for member in members.values():
            member.kill()
        await until(lambda: all(hosted.failures for hosted in keeper.models.values()))
        assert keeper.fault_of("one").count("'one'") == 2
        assert keeper.fault_of("two") == "", "it is loaded with the next request"
        members["one"].gate.clear()
        clock.now += 60
        await until(lambda: "loading" in keeper.fault_of("one"))
        members["one"].gate.set()
        await until(lambda: not keeper.fault_of("one"))
        await keeper.sleep_or_unload("one", unload=False)
        assert keeper.fault_of("one") == "", "an administrator wants it so"


async def test_with_the_end_of_the_set_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(monkeypatch, 100, one={}, two={"keep_alive_s": 60.0}) as (keeper, members, clock):
        await keeper.start(["one"])
        members["two"].gate.clear()
        async with keeper.lease("one"):
            waiting = asyncio.create_task(ask(keeper, "two"))
            await until(lambda: members["two"].is_running)
            keeper.drain()
            with refuses(HttpError, "shutting-down"):
                await waiting
            with refuses(HttpError, "shutting-down"):
                await ask(keeper, "two")
            assert members["one"].told == ["start", "terminate"]
        members["one"].kill()
        clock.now += 60
        await asyncio.sleep(0.05)
        assert members["one"].told.count("start") == 1, "nothing starts again"
