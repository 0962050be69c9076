"""Residency: which models of a set are awake, asleep or unloaded, and which models free memory for which others.

Pure: no clock, no I/O. All sizes are bytes by device: "cuda:N" is a GPU, "cpu" the memory of the host. Times are
seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from weft.errors import PlanError

TURN_S = 5.0  # seconds for which a model answers requests before it ends its turn for another model


class State(Enum):
    """The state of a model; LOADING, WAKING, SLEEPING and UNLOADING last until a process has done so."""

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
    """One model: its needs and its use.

    - `running`: number of running requests; they keep it awake.
    - `stays_s`: seconds that it stays awake after its last request, as this request says; None: as configured.
    - `ends_turn`: new requests wait, because another model needs this memory, or because an administrator asked for
      sleep or an unload (`leaves`).
    - `slept`: it has slept since it was loaded, so its copy in the host's memory stays allocated.
    - `pinned`: it never frees memory for other models.
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
        """Bytes by device that it takes while it is awake, with the host's copy of GPU weights if there is one."""
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


class PlacementDecision(NamedTuple):
    """The changes of other models that free the memory for a model.

    `sleepers` are put to sleep and `leavers` unloaded now, `waits_for` as soon as their requests have ended.
    `settling`: models that must change are changing their state. `again_s`: the time at which the next turn may end.
    """

    sleepers: tuple[str, ...] = ()
    leavers: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    settling: bool = False
    again_s: float = math.inf

    @property
    def ready(self) -> bool:
        """True if the model fits without changes."""
        return not (self.sleepers or self.leavers or self.waits_for or self.settling or math.isfinite(self.again_s))


class Residency:
    """The models of a set, and the memory that they share. `rooms`: bytes of each device that they may take."""

    def __init__(self, rooms: Mapping[str, int], tenants: Iterable[Tenant] = ()) -> None:
        self.rooms = dict(rooms)
        self.tenants = {tenant.name: tenant for tenant in tenants}

    def held(self, device: str) -> int:
        """Bytes of a device that are taken."""
        return sum(tenant.held.get(device, 0) for tenant in self.tenants.values())

    def decide_placement(self, name: str, now: float) -> PlacementDecision:
        """The changes that free the memory which a model needs to be awake.

        Models with the largest priority number sleep first, and among equals the least recently used. If the host has
        no memory for another sleeping model, sleeping models are unloaded in the same order. Raises PlanError if the
        model does not fit after all possible changes.
        """
        need = self.tenants[name].awake_bytes
        states = {other.name: other.held for other in self.tenants.values() if other.name != name}
        changed: dict[str, Tenant] = {}
        for victim, held in self._steps(name):
            short = self._lacking_devices(need, states)
            if not short:
                break
            if any(states[victim.name].get(device, 0) > held.get(device, 0) for device in short):
                states[victim.name] = held
                changed[victim.name] = victim
        if short := self._lacking_devices(need, states):
            raise self._overflow_error(name, short[0], states)
        return _decide([(victim, bool(states[victim.name])) for victim in changed.values()], now)

    def _steps(self, name: str) -> list[tuple[Tenant, Mapping[str, int]]]:
        """The steps that free memory, first to last: each a model, and the bytes that it holds afterwards."""
        others = [other for other in self.tenants.values() if other.name != name and not other.pinned]
        order = sorted(others, key=lambda other: (-other.priority, other.used_s))
        awake = [other for other in order if other.state not in (State.ASLEEP, State.UNLOADED)]
        asleep = [other for other in order if other.state is State.ASLEEP]
        return [
            *((other, other.need.asleep) for other in awake),
            *((other, {}) for other in asleep),
            *((other, {}) for other in awake),
        ]

    def _lacking_devices(self, need: Mapping[str, int], states: Mapping[str, Mapping[str, int]]) -> list[str]:
        """The devices on which `need` does not fit together with the bytes of the other models."""
        return [
            device
            for device in sorted({*self.rooms, *need})
            if need.get(device, 0) + sum(held.get(device, 0) for held in states.values()) > self.rooms.get(device, 0)
        ]

    def _overflow_error(self, name: str, device: str, states: Mapping[str, Mapping[str, int]]) -> PlanError:
        taken = sum(held.get(device, 0) for held in states.values())
        return PlanError(
            f"{name!r} needs {self.tenants[name].awake_bytes.get(device, 0):,} bytes of {device}, which has "
            f"{self.rooms.get(device, 0):,}, {taken:,} of them held by models that cannot be unloaded; unload a "
            "model, or give a model a keep-alive",
            code="no-room-for-model",
        )

    def may_sleep(self, name: str) -> bool:
        """Return True if the host has memory for the model while it sleeps; else it has to be unloaded."""
        states = {other.name: other.held for other in self.tenants.values() if other.name != name}
        return not self._lacking_devices(self.tenants[name].need.asleep, states)

    def expired(self, now: float) -> list[str]:
        """The models whose keep-alive has expired."""
        return [tenant.name for tenant in self.tenants.values() if tenant.expires_s <= now]


def _decide(changed: Sequence[tuple[Tenant, bool]], now: float) -> PlacementDecision:
    """The decision to have these models sleep (True) or unload (False)."""
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
    return PlacementDecision(tuple(sleepers), tuple(leavers), tuple(waits_for), settling, again_s)
