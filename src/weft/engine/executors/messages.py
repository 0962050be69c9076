"""Messages between an executor and the process of a rank."""

from __future__ import annotations

import msgspec

from weft.engine.core.commands import RankCommand, Reply
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.processes.liveness import Alive, Heartbeat
from weft.errors import Cause
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.plan.wiring import Rendezvous, Tcp, Wiring


class Launch(msgspec.Struct, frozen=True, tag=True):
    """The first frame: which rank of which plan the process is, and its way to the other ranks.

    `worker` is "module:Class".
    """

    plan: Plan
    rank: int
    worker: str
    rendezvous: Rendezvous
    wiring: Wiring


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Every rank has reported its capacity, and this number of KV blocks fits on all of them."""

    num_blocks: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    step: StepPlan


class RunCommand(msgspec.Struct, frozen=True, tag=True):
    """To be executed between the steps that come before and after it."""

    command: RankCommand


ToRank = Launch | Allocate | RunStep | RunCommand | Heartbeat


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 listens at this address, through which the other ranks find it."""

    address: Tcp


class PhaseEntered(msgspec.Struct, frozen=True, tag=True):
    """The rank goes on to the next phase of its start."""

    phase: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The rank has read `done` of the `total` bytes of its weights."""

    rank: int
    done: int
    total: int


class Capturing(msgspec.Struct, frozen=True, tag=True):
    """The rank has captured `done` of the `total` CUDA graphs for which its start waits."""

    rank: int
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """The rank is warm, and ready for steps. `uncaptured` is the number of CUDA graphs still to be captured."""

    uncaptured: int = 0


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to RunCommand, in the order of the commands."""

    reply: Reply


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A step's result, from the output rank, in the order of the steps."""

    result: StepResult


class RankFailed(msgspec.Struct, frozen=True, tag="Failed"):
    """The rank's last message. With `lost_peer`, it fails only because another rank has gone."""

    cause: Cause
    lost_peer: bool


FromRank = (
    Listening | PhaseEntered | Loading | Capturing | Loaded | Allocated | CommandDone | StepDone | RankFailed | Alive
)
