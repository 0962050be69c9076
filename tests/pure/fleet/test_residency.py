"""Models that are awake, of several that do not all fit: the policy as a value, without a clock."""

from __future__ import annotations

import math
import random

import pytest

from tests.refusals import refuses
from weft.api.ollama.keep_alive import default_keep_alive, parse_keep_alive
from weft.errors import ConfigError, PlanError
from weft.fleet.hosting.residency import TURN_S, Need, PlacementDecision, Residency, State, Tenant

ROOMS = {"cuda:0": 100, "cpu": 100}


def tenant(name: str, awake: int = 60, asleep: int = 40, **fields: object) -> Tenant:
    """A model that takes `awake` bytes of the GPU, and sleeping 5 there and `asleep` of the host."""
    need = Need({"cuda:0": awake, "cpu": 1}, {"cuda:0": 5, "cpu": asleep})
    return Tenant(**{"name": name, "need": need, "keep_alive_s": 300.0, "state": State.AWAKE, **fields})  # type: ignore[arg-type]


def test_the_least_recently_used_sleeps_for_another() -> None:
    set_of_three = [
        tenant("old", 40, used_s=1.0),
        tenant("new", 40, used_s=2.0),
        tenant("asked", 40, state=State.UNLOADED),
    ]
    assert Residency(ROOMS, set_of_three).decide_placement("asked", 9.0) == PlacementDecision(sleepers=("old",))


def test_the_largest_priority_number_sleeps_first() -> None:
    tenants = [
        tenant("old", 40, used_s=1.0),
        tenant("low", 40, used_s=2.0, priority=1),
        tenant("asked", 40, state=State.ASLEEP),
    ]
    assert Residency(ROOMS, tenants).decide_placement("asked", 9.0).sleepers == ("low",)


def test_nobody_sleeps_where_there_is_room() -> None:
    room = Residency(ROOMS, [tenant("one", 40), tenant("asked", 40, state=State.UNLOADED)]).decide_placement(
        "asked", 9.0
    )
    assert room.ready
    assert room == PlacementDecision()


def test_models_elsewhere_do_not_sleep() -> None:
    elsewhere = Tenant(
        name="elsewhere", need=Need({"cuda:1": 90}, {"cuda:1": 5}), keep_alive_s=1.0, state=State.AWAKE, used_s=0.0
    )
    tenants = [elsewhere, tenant("here", used_s=5.0), tenant("asked", state=State.UNLOADED)]
    assert Residency({**ROOMS, "cuda:1": 100}, tenants).decide_placement("asked", 9.0).sleepers == ("here",)


def test_a_model_with_requests_ends_its_turn_first() -> None:
    busy = tenant("busy", running=2, woken_s=10.0)
    residency = Residency(ROOMS, [busy, tenant("asked", state=State.ASLEEP)])
    early = residency.decide_placement("asked", 11.0)
    assert early == PlacementDecision(again_s=10.0 + TURN_S)
    assert not early.ready
    assert residency.decide_placement("asked", 10.0 + TURN_S) == PlacementDecision(waits_for=("busy",))
    busy.running = 0
    assert residency.decide_placement("asked", 11.0) == PlacementDecision(sleepers=("busy",)), (
        "an idle one has no turn to end"
    )


@pytest.mark.parametrize("state", [State.SLEEPING, State.LOADING, State.WAKING, State.UNLOADING])
def test_a_change_is_waited_for(state: State) -> None:
    room = Residency(ROOMS, [tenant("other", state=state), tenant("asked", state=State.ASLEEP)]).decide_placement(
        "asked", 9.0
    )
    assert room == PlacementDecision(settling=True)


def test_sleepers_leave_where_the_host_is_full() -> None:
    tenants = [
        tenant("deep", state=State.ASLEEP, used_s=1.0),
        tenant("light", state=State.ASLEEP, used_s=2.0),
        tenant("awake", used_s=3.0),
        tenant("asked", state=State.UNLOADED),
    ]
    room = Residency(ROOMS, tenants).decide_placement("asked", 9.0)
    assert room == PlacementDecision(sleepers=("awake",), leavers=("deep",)), (
        "40 + 40 + 40 bytes asleep are more than the host has"
    )


def test_an_awake_one_leaves_where_sleep_is_not_enough() -> None:
    tenants = [tenant("other", used_s=3.0), tenant("asked", 98, state=State.UNLOADED)]
    assert Residency(ROOMS, tenants).decide_placement("asked", 9.0) == PlacementDecision(leavers=("other",))


def test_no_room_names_the_bytes() -> None:
    pinned = tenant("pinned", keep_alive_s=math.inf)
    residency = Residency(ROOMS, [pinned, tenant("asked", state=State.UNLOADED)])
    with refuses(PlanError, "no-room-for-model", "asked", "60 bytes", "cuda:0", "100", "60"):
        residency.decide_placement("asked", 9.0)


def test_time_awake_begins_with_the_end_of_the_last_request() -> None:
    one = tenant("one", keep_alive_s=10.0, used_s=100.0, running=1)
    residency = Residency(ROOMS, [one, tenant("pinned", 1, keep_alive_s=math.inf, used_s=0.0)])
    assert residency.expired(500.0) == []
    one.running = 0
    assert residency.expired(109.0) == []
    assert residency.expired(110.0) == ["one"]
    assert one.expires_s == 110.0


def test_sleep_needs_room_in_the_host() -> None:
    tenants = [tenant("a", asleep=70, state=State.ASLEEP), tenant("b", asleep=29), tenant("c", 30, asleep=31)]
    residency = Residency(ROOMS, tenants)
    assert residency.may_sleep("b")
    assert not residency.may_sleep("c")


def test_what_a_model_took_of_the_host_to_sleep_stays_taken() -> None:
    """Its copy is pinned, which takes long. Only to leave gives it back."""
    one = tenant("one", 60, asleep=70, slept=True)
    other = tenant("other", 30, asleep=40, state=State.UNLOADED)
    residency = Residency(ROOMS, [one, other])
    assert residency.held("cpu") == 70
    assert residency.held("cuda:0") == 60
    assert not residency.may_sleep("other")
    one.state = State.ASLEEP
    assert residency.decide_placement("one", 9.0).ready
    one.state, one.slept = State.AWAKE, False
    assert residency.held("cpu") == 1
    big = tenant("big", 40, asleep=40, state=State.UNLOADED, slept=True)
    assert Residency(ROOMS, [tenant("one", 60, asleep=70, slept=True), big]).decide_placement(
        "big", 9.0
    ) == PlacementDecision(leavers=("one",)), "70 and 40 bytes of the host's memory"


def test_random_sets_never_take_more_than_there_is() -> None:
    """After the steps that it names, the model fits; and no step is one that was not needed."""
    draw = random.Random(1)
    for _ in range(500):
        tenants = [
            tenant(
                f"m{number}",
                draw.randrange(1, 99),
                draw.randrange(1, 60),
                state=draw.choice([State.UNLOADED, State.ASLEEP]),
                used_s=draw.random(),
                priority=draw.randrange(3),
            )
            for number in range(6)
        ]
        residency = Residency(ROOMS, tenants)
        for now in range(20):
            asked = draw.choice(tenants)
            room = residency.decide_placement(asked.name, float(now))
            assert room.ready or not residency.decide_placement(asked.name, float(now)).settling
            for name in room.sleepers:
                residency.tenants[name].state = State.ASLEEP
            for name in room.leavers:
                residency.tenants[name].state = State.UNLOADED
            assert residency.decide_placement(asked.name, float(now)).ready
            asked.state, asked.used_s = State.AWAKE, float(now)
            assert all(residency.held(device) <= size for device, size in ROOMS.items())


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        (300, 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("24h", 86400.0),
    ],
)
def test_keep_alive(given: object, seconds: float) -> None:
    assert parse_keep_alive(given, "keep_alive") == pytest.approx(seconds)


@pytest.mark.parametrize("given", [None, True, "", "soon", "5 minutes", "m5", [], "5m x", float("nan")])
def test_keep_alive_that_is_no_time(given: object) -> None:
    with refuses(ConfigError, "invalid-keep-alive", "keep_alive"):
        parse_keep_alive(given, "keep_alive")


def test_the_variable() -> None:
    assert default_keep_alive({}) == 300.0
    assert default_keep_alive({"OLLAMA_KEEP_ALIVE": "-1"}) == math.inf
    assert default_keep_alive({"OLLAMA_KEEP_ALIVE": "10m"}) == 600.0
    with refuses(ConfigError, "invalid-keep-alive", "OLLAMA_KEEP_ALIVE", "ten"):
        default_keep_alive({"OLLAMA_KEEP_ALIVE": "ten"})
