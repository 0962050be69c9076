"""Messages between a client and the core in a process of its own."""

from __future__ import annotations

import msgspec

from weft.config import EngineConfig
from weft.engine.core.commands import Command, Replies, ResetPrefixCache
from weft.engine.core.request import Output, Request, Stats
from weft.engine.executors.base import StartResult
from weft.engine.executors.node_messages import OtherNodes
from weft.engine.executors.ray_nodes import RayNodes
from weft.engine.processes.liveness import Alive, Heartbeat
from weft.errors import Cause
from weft.plan.plan import Plan


class InheritedServer(msgspec.Struct, frozen=True):
    """A fork server that the client has started: the descriptor of its socket, which the core inherits, and its pid."""

    descriptor: int
    pid: int


class StartCore(msgspec.Struct, frozen=True, tag=True):
    """The first frame: the plan to run, and the class that each rank runs, as "module:Class".

    `others` are nodes that have joined; this process has inherited their connections. `stall_s` is the limit after
    which a rank that shows no sign of life, or a step that does not finish, is a failure. `forks` forks the ranks.
    """

    plan: Plan
    config: EngineConfig
    worker: str
    others: OtherNodes | RayNodes | None = None
    stall_s: float | None = None
    forks: InheritedServer | None = None


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class CallRanks(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks execute a command. `id` is a number that no other call has."""

    id: int
    command: Command | ResetPrefixCache


ToCore = StartCore | AddRequests | AbortRequests | CallRanks | Heartbeat


class CoreStarted(msgspec.Struct, frozen=True, tag=True):
    """Every rank is warm. `plan` is the executed plan: its max_model_len fits the KV cache."""

    plan: Plan
    ready: StartResult


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """A request that the core does not take: the queue is `full`, or the request can never run.

    `message`, `code` and `param` are the error's.
    """

    id: str
    message: str
    code: str
    full: bool
    param: str | None = None


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of the steps that have just finished, and the core's stats after them."""

    outputs: list[Output]
    stats: Stats


class CallDone(msgspec.Struct, frozen=True, tag=True):
    """The ranks' replies to a command, and the core's stats after it."""

    id: int
    replies: Replies
    stats: Stats


class CallRefused(msgspec.Struct, frozen=True, tag=True):
    """A command that the core does not take in its state, or that a rank has refused."""

    id: int
    message: str
    code: str
    param: str | None = None


class CoreFailed(msgspec.Struct, frozen=True, tag=True):
    """The core's last message."""

    cause: Cause


FromCore = CoreStarted | RequestRefused | StepOutputs | CallDone | CallRefused | CoreFailed | Alive
