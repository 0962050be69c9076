"""What an executor and the process of a rank say to each other."""

from __future__ import annotations

import msgspec

from weft.core.step import StepPlan, StepResult
from weft.errors import Cause
from weft.plan.memory import Capacity
from weft.plan.plan import Plan


class StageFiles(msgspec.Struct, frozen=True):
    """Open files that the ranks of one stage have in common: memory, and for each a pipe (read, write)."""

    memory: int
    pipes: tuple[tuple[int, int], ...]


class LinkFiles(msgspec.Struct, frozen=True):
    """Open files that two stages have in common: memory, and pipes (read, write) that tell of what was brought and of
    what was taken."""

    memory: int
    full: tuple[int, int]
    free: tuple[int, int]


class Launch(msgspec.Struct, frozen=True, tag=True):
    """The first frame: who you are. `worker` is "module:Class", `store` a file through which ranks find each
    other."""

    plan: Plan
    rank: int
    worker: str
    store: str
    shared: StageFiles | None
    before: LinkFiles | None = None
    after: LinkFiles | None = None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Every rank has reported its capacity: this many KV blocks fit on all."""

    num_blocks: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    step: StepPlan


class CaptureGraph(msgspec.Struct, frozen=True, tag=True):
    """No request runs or waits: capture one more CUDA graph."""


ToRank = Launch | Allocate | RunStep | CaptureGraph


class PhaseEntered(msgspec.Struct, frozen=True, tag=True):
    """The rank goes on to the next phase of its start."""

    phase: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity


class Allocated(msgspec.Struct, frozen=True, tag=True):
    """The rank is warm, and ready for steps. So many CUDA graphs are still to be captured."""

    uncaptured: int = 0


class GraphCaptured(msgspec.Struct, frozen=True, tag=True):
    """The answer to CaptureGraph: so many are left."""

    uncaptured: int


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """From the output rank, once per step and in their order."""

    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank's last word. With `lost_peer` it fails only because another has gone."""

    cause: Cause
    lost_peer: bool


FromRank = PhaseEntered | Loaded | Allocated | GraphCaptured | StepDone | Failed
