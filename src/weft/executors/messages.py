"""Messages between an executor and the process of a rank."""

from __future__ import annotations

import msgspec

from weft.core.commands import Command, Reply
from weft.core.step import StepPlan, StepResult
from weft.errors import Cause
from weft.plan.memory import Capacity
from weft.plan.plan import Plan


class StageFiles(msgspec.Struct, frozen=True):
    """File descriptors that the ranks of one stage share: memory, and a pipe (read, write) for each rank."""

    memory: int
    pipes: tuple[tuple[int, int], ...]


class LinkFiles(msgspec.Struct, frozen=True):
    """File descriptors that two consecutive stages share: memory, and two pipes (read, write).

    `full` tells the receiver that a tensor was written, `free` tells the sender that one was taken.
    """

    memory: int
    full: tuple[int, int]
    free: tuple[int, int]


class Launch(msgspec.Struct, frozen=True, tag=True):
    """The first frame: which rank of which plan the process is.

    `worker` is "module:Class". `store` is the path of a file through which ranks find each other. `before` and `after`
    are the links to the neighbouring stages.
    """

    plan: Plan
    rank: int
    worker: str
    store: str
    shared: StageFiles | None
    before: LinkFiles | None = None
    after: LinkFiles | None = None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Every rank has reported its capacity, and this number of KV blocks fits on all of them."""

    num_blocks: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    step: StepPlan


class RunCommand(msgspec.Struct, frozen=True, tag=True):
    """To be executed between the steps that come before and after it."""

    command: Command


ToRank = Launch | Allocate | RunStep | RunCommand


class PhaseEntered(msgspec.Struct, frozen=True, tag=True):
    """The rank goes on to the next phase of its start."""

    phase: str


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


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank's last message. With `lost_peer`, it fails only because another rank has gone."""

    cause: Cause
    lost_peer: bool


FromRank = PhaseEntered | Loaded | Allocated | CommandDone | StepDone | Failed
