"""What a client and the core in a process of its own say to each other."""

from __future__ import annotations

import msgspec

from weft.config import EngineConfig
from weft.core.request import Output, Request, Stats
from weft.errors import Cause
from weft.executors.base import Ready
from weft.plan.plan import Plan


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first frame: what to run, and the class that each rank is, as "module:Class"."""

    plan: Plan
    config: EngineConfig
    worker: str


class Add(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


ToCore = Begin | Add | Abort


class Started(msgspec.Struct, frozen=True, tag=True):
    """Every rank is warm. `plan` is the one that runs: its max_model_len fits the KV cache."""

    plan: Plan
    ready: Ready


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that is not taken: with `full` one too many for the queue, else one that can never run."""

    id: str
    message: str
    full: bool
    param: str | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All that the steps brought that have just ended, and the core as it is now."""

    outputs: list[Output]
    stats: Stats


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The core's last word."""

    cause: Cause


FromCore = Started | Refused | Outputs | Broken
