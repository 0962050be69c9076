"""Residency: which models of a set are awake, asleep or unloaded, and who makes room for whom. Pure: no clock, no I/O.

All sizes are bytes by device: "cuda:N" is a GPU, "cpu" the memory of the host. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from weft.errors import PlanError

TURN_S = 5.0  # seconds for which a model answers requests before it ends its turn for another one


class State(Enum):
    """The state of a model; LOADING, WAKING, SLEEPING and UNLOADING last until a process has obeyed."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    AWAKE = "awake"
    SLEEPING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    UNLOADING = "unloading"


class Need(msgspec.Struct, frozen=True):
    """Bytes by device that a model takes while it is awake, and while it sleeps."""

    awake: Mapping[str, int]
    asleep: Mapping[str, int]


class Tenant(msgspec.Struct, kw_only=True, eq=False):
    """One model: its needs, and what is known of its use. `running` requests keep it awake.

    `stays_s`: seconds that it stays awake after its last request, as this says; None: as configured. `ends_turn`:
    requests wait, since another model waits for its room. `leaves`: so does an administrator. `slept`: it has slept
    since it was loaded, and what it took for that of the host's memory stays taken. `pinned`: it makes room for nobody.
    """

    name: str
    need: Need
    keep_alive_s: float
    priority: int = 0
    state: State = State.UNLOADED
    running: int = 0
    used_s: float = -math.inf
    woken_s: float = -math.inf
    stays_s: float | None = None
    ends_turn: bool = False
    leaves: bool = False
    slept: bool = False

    @property
    def pinned(self) -> bool:
        return math.isinf(self.keep_alive_s)

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes by device that it takes now, at most."""
        if self.state is State.UNLOADED:
            return {}
        return self.need.asleep if self.state is State.ASLEEP else self.awake_bytes

    @property
    def awake_bytes(self) -> Mapping[str, int]:
        """Bytes by device that it takes while it is awake; of weights on GPUs a copy stays in the host's memory."""
        if not self.slept:
            return self.need.awake
        devices = {**self.need.awake, **self.need.asleep}
        return {device: max(self.need.awake.get(device, 0), self.need.asleep.get(device, 0)) for device in devices}

    @property
    def expires_s(self) -> float:
        """The time at which it falls asleep; infinity while requests run."""
        if self.running or self.state is not State.AWAKE:
            return math.inf
        return self.used_s + (self.keep_alive_s if self.stays_s is None else self.stays_s)


class Room(NamedTuple):
    """The way to a model's room: `sleepers` and `leavers` make it now, `waits_for` do once their requests have ended.

    `settling`: models that change their state already. `again_s`: the time at which the next turn may end.
    """

    sleepers: tuple[str, ...] = ()
    leavers: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    settling: bool = False
    again_s: float = math.inf

    @property
    def ready(self) -> bool:
        """True if the model fits now."""
        return not (self.sleepers or self.leavers or self.waits_for or self.settling or math.isfinite(self.again_s))


class Residency:
    """The models of a set, and the memory that they divide. `rooms`: bytes of each device that they may take."""

    def __init__(self, rooms: Mapping[str, int], tenants: Iterable[Tenant] = ()) -> None:
        self.rooms = dict(rooms)
        self.tenants = {tenant.name: tenant for tenant in tenants}

    def held(self, device: str) -> int:
        """Bytes of a device that are taken."""
        return sum(tenant.held.get(device, 0) for tenant in self.tenants.values())

    def room_for(self, name: str, now: float) -> Room:
        """The way to the room that a model needs to be awake.

        The models that sleep for it are those with the largest priority number, and of these the least recently used.
        If the host has no room for one more that sleeps, models that sleep already are unloaded in the same order.
        Raises PlanError if it has no room though all others that may make room have done so.
        """
        need = self.tenants[name].awake_bytes
        states = {other.name: other.held for other in self.tenants.values() if other.name != name}
        changed: dict[str, Tenant] = {}
        for victim, held in self._ways(name):
            short = self._short(need, states)
            if not short:
                break
            if any(states[victim.name].get(device, 0) > held.get(device, 0) for device in short):
                states[victim.name] = held
                changed[victim.name] = victim
        if short := self._short(need, states):
            raise self._no_room(name, short[0], states)
        return _room([(victim, bool(states[victim.name])) for victim in changed.values()], now)

    def _ways(self, name: str) -> list[tuple[Tenant, Mapping[str, int]]]:
        """The steps that make room, first to last: each a model, and the bytes that it holds afterwards."""
        others = [other for other in self.tenants.values() if other.name != name and not other.pinned]
        order = sorted(others, key=lambda other: (-other.priority, other.used_s))
        awake = [other for other in order if other.state not in (State.ASLEEP, State.UNLOADED)]
        asleep = [other for other in order if other.state is State.ASLEEP]
        return [
            *((other, other.need.asleep) for other in awake),
            *((other, {}) for other in asleep),
            *((other, {}) for other in awake),
        ]

    def _short(self, need: Mapping[str, int], states: Mapping[str, Mapping[str, int]]) -> list[str]:
        """The devices that lack room for `need` beside what the others hold."""
        return [
            device
            for device in sorted({*self.rooms, *need})
            if need.get(device, 0) + sum(held.get(device, 0) for held in states.values()) > self.rooms.get(device, 0)
        ]

    def _no_room(self, name: str, device: str, states: Mapping[str, Mapping[str, int]]) -> PlanError:
        taken = sum(held.get(device, 0) for held in states.values())
        return PlanError(
            f"{name!r} needs {self.tenants[name].awake_bytes.get(device, 0):,} bytes of {device}, which has "
            f"{self.rooms.get(device, 0):,}, {taken:,} of them held by models that make no room; unload one, or give "
            "one a keep-alive",
            code="no-room-for-model",
        )

    def may_sleep(self, name: str) -> bool:
        """Return True if the host has room for the model while it sleeps; else it has to be unloaded."""
        states = {other.name: other.held for other in self.tenants.values() if other.name != name}
        return not self._short(self.tenants[name].need.asleep, states)

    def expired(self, now: float) -> list[str]:
        """The models whose time awake is over."""
        return [tenant.name for tenant in self.tenants.values() if tenant.expires_s <= now]


def _room(changed: Sequence[tuple[Tenant, bool]], now: float) -> Room:
    """The room that models make by what they are to do: sleep (True), or leave."""
    sleepers: list[str] = []
    leavers: list[str] = []
    waits_for: list[str] = []
    again_s, settling = math.inf, False
    for victim, sleeps in changed:
        turn_ends_s = victim.woken_s + TURN_S
        if victim.state not in (State.AWAKE, State.ASLEEP):
            settling = True
        elif victim.running and now < turn_ends_s:
            again_s = min(again_s, turn_ends_s)
        elif victim.running:
            waits_for.append(victim.name)
        else:
            (sleepers if sleeps else leavers).append(victim.name)
    return Room(tuple(sleepers), tuple(leavers), tuple(waits_for), settling, again_s)
