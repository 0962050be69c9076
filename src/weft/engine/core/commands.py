"""Commands that the ranks execute between steps, their replies, and the queue in which commands wait for the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec

from weft.engine.core.groups import GroupedScheduler
from weft.engine.core.scheduler import Scheduler
from weft.errors import RequestError

LEVELS = (1, 2)  # levels of sleep
LoadFormat = Literal["safetensors", "gguf", "dummy", "sharded_state"]


class CaptureGraph(msgspec.Struct, frozen=True, tag=True):
    """Capture one more CUDA graph. Every reply is a GraphsLeft."""

    phase: ClassVar[str] = "capture"


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Trace the next `steps` steps, and write the trace into `directory`. 0 steps end a running trace.

    Every reply is a TraceFile, written once the steps are over.
    """

    phase: ClassVar[str] = "profile"
    steps: int
    directory: str


class RankStats(msgspec.Struct, frozen=True, tag=True):
    """Report times and memory. With `reset`, the next report counts from now on. Every reply is a RankReport."""

    phase: ClassVar[str] = "report"
    reset: bool = True


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Give the memory of the KV cache and of the weights back.

    At level 1 the weights are moved to the host's memory; CPU weights are not moved. At level 2, and at level 1 in a
    pipeline over a CPU and GPUs, they are dropped.
    """

    phase: ClassVar[str] = "sleep"
    level: int


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Undo Sleep; weights that were dropped are read from the checkpoint. Every reply is a GraphsLeft."""

    phase: ClassVar[str] = "wake-up"


class SwapWeights(msgspec.Struct, frozen=True, tag=True):
    """Read the weights of another checkpoint of the same shapes into the same memory; asleep, with the next Wake.

    Either all ranks take the new weights or all keep the old ones: the queue has all ranks check and stage them, and
    then take or drop them. Raises RequestError for weights that a rank refuses.
    """

    phase: ClassVar[str] = "swap"
    checkpoint: str
    load_format: LoadFormat


class PrepareSwap(msgspec.Struct, frozen=True, tag=True):
    """Check the weights of another checkpoint; with `stage`, read the checked weights into the host's memory.

    Every reply is Done or Refused. The model stays as it is.
    """

    phase: ClassVar[str] = "swap"
    checkpoint: str
    load_format: LoadFormat
    stage: bool


class FinishSwap(msgspec.Struct, frozen=True, tag=True):
    """Take the weights that all ranks have staged, or drop the part that this rank has staged."""

    phase: ClassVar[str] = "swap"
    take: bool


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Let no later prompt reuse KV blocks. The core does this alone, and there are no replies."""


Command = CaptureGraph | Profile | RankStats | Sleep | Wake | SwapWeights
RankCommand = CaptureGraph | Profile | RankStats | Sleep | Wake | PrepareSwap | FinishSwap


class Done(msgspec.Struct, frozen=True, tag=True):
    """Reply to a command that has no other."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reply to PrepareSwap of a rank that cannot take the weights, with the code and the text of the reason."""

    code: str
    reason: str


class GraphsLeft(msgspec.Struct, frozen=True, tag=True):
    """Number of CUDA graphs that are still to be captured."""

    count: int


class TraceFile(msgspec.Struct, frozen=True, tag=True):
    """Reply to Profile: the file of the trace that begins or has ended, "" for none.

    `steps`: the number of steps in a trace that has ended.
    """

    path: str
    steps: int = 0


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's steps, and its times in seconds. The text in a type describes a metric of Prometheus with this value.

    - `compute_s`: within steps, without the two times that follow; on a GPU, the GPU's time with its exchanges.
    - `communication_s`: within steps, exchanging tensors with other ranks: 0 if there are none, None on a GPU among
      several, whose exchanges are not told apart from `compute_s`.
    - `waiting_s`: without a step, or waiting for other ranks within a step. Over gloo and NCCL the wait for a rank of
      the same stage counts as communication.
    - `idle_s`: the part of `waiting_s` without a step; None on a GPU.
    - `delayed_s`: the thread that computes could have run, but its cores had other work; 0 where the system does not
      tell. It is a part of the times above.
    """

    steps: int
    compute_s: Annotated[float, "Seconds within steps, computing."]
    communication_s: Annotated[float | None, "Seconds within steps, exchanging tensors."]
    waiting_s: Annotated[float, "Seconds without a step, or waiting for other ranks."]
    idle_s: float | None = None
    delayed_s: float = 0.0


TIMES = tuple(name for name in RankTimes.__struct_fields__ if name != "steps")


class RankReport(RankTimes, frozen=True, tag=True, kw_only=True):
    """Steps and times of a rank since its last report or its start, and its memory in bytes.

    - `allocated_bytes`: on a GPU, of tensors; on a CPU, the resident memory of the rank's process.
    - `reserved_bytes`: on a GPU, the memory that torch has reserved. `driver_bytes`: the memory in use by the driver's
      count, other processes' included. Both are None on a CPU.
    - `routed_tokens`: tokens that each expert of the rank has computed since its start, over all layers; empty without
      experts.
    """

    allocated_bytes: Annotated[int, "Bytes of tensors; on a CPU, resident memory of the rank's process."]
    reserved_bytes: Annotated[int | None, "Bytes that torch holds of a GPU's memory."] = None
    driver_bytes: Annotated[int | None, "Bytes in use of a GPU's memory by the driver's count."] = None
    routed_tokens: tuple[int, ...] = ()


Reply = Done | Refused | GraphsLeft | TraceFile | RankReport
Replies = list[Reply]  # in the order of ranks


class CommandExecutor(Protocol):
    """The part of a started executor that carries commands to the ranks."""

    def call(self, command: RankCommand) -> Future[Replies]: ...


@dataclass
class QueuedCommand:
    """A command, with the rounds that the ranks still have to execute for it, in order."""

    command: Command | ResetPrefixCache
    promise: Future[Replies] = field(default_factory=Future)
    rounds: deque[RankCommand] = field(init=False)
    refusal: RequestError | None = None

    def __post_init__(self) -> None:
        self.rounds = deque(rank_commands(self.command))

    def take_replies(self, replies: Replies) -> None:
        """Take the ranks' replies to a round. If a rank has refused, all ranks drop what they have staged."""
        refusals = [(rank, reply) for rank, reply in enumerate(replies) if isinstance(reply, Refused)]
        if refusals:
            rank, first = refusals[0]
            self.rounds = deque([FinishSwap(take=False)])
            self.refusal = RequestError(
                f"the engine keeps its weights, since rank {rank} cannot take the new ones: {first.reason}",
                param="checkpoint",
                code=first.code,
            )


class CommandQueue:
    """Commands in the order of arrival. Each waits for the steps in flight; no step is submitted until it is done.

    Before the ranks lose KV, all running requests are preempted: they compute it again afterwards, and lose no token.
    `holds` is True while no step may be submitted, since a command waits or runs, or the engine sleeps. `sleep_level`
    is 0 for an engine that is awake. `wake` is called with a future when `advance` has to be called again.
    """

    def __init__(self, scheduler: Scheduler | GroupedScheduler, executor: CommandExecutor) -> None:
        self.holds = False
        self.sleep_level = 0
        self.wake: Callable[[Future[Replies]], None] = lambda future: None
        self._scheduler, self._executor = scheduler, executor
        self._queue: deque[QueuedCommand] = deque()
        self._running: Future[Replies] | None = None  # the replies to the first command
        self._next_level = 0  # of sleep, after all commands

    def add(self, command: Command | ResetPrefixCache) -> Future[Replies]:
        """Queue a command. Raises RequestError if an engine in this state does not take it."""
        self._next_level = level_after(command, self._next_level)
        self.holds = True
        queued = QueuedCommand(command)
        queued.promise.set_running_or_notify_cancel()  # a caller that gives up must not end the core
        self._queue.append(queued)
        return queued.promise

    def advance(self, in_flight: int) -> bool:
        """Start and finish commands while `in_flight` steps run. Returns True if steps may be submitted.

        Raises EngineError if a rank has failed.
        """
        while self._queue:
            first = self._queue[0]
            if self._running is None:
                if in_flight:
                    return False
                self._running = self._start_round(first)
                self._running.add_done_callback(self.wake)
            if not self._running.done():
                return False
            replies, self._running = self._running.result(), None
            first.take_replies(replies)
            if not first.rounds:
                self._finish(first, replies)
        self.holds = self.sleep_level > 0
        return not self.holds

    def fail(self, error: Exception) -> None:
        """Fail all commands that are not done."""
        while self._queue:
            self._queue.popleft().promise.set_exception(error)

    def _start_round(self, queued: QueuedCommand) -> Future[Replies]:
        if not queued.rounds:
            self._scheduler.reset_prefix_cache()
            nothing: Future[Replies] = Future()
            nothing.set_result([])
            return nothing
        command = queued.rounds.popleft()
        if isinstance(command, Sleep) or (isinstance(command, FinishSwap) and command.take):
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()
        return self._executor.call(command)

    def _finish(self, queued: QueuedCommand, replies: Replies) -> None:
        self.sleep_level = level_after(queued.command, self.sleep_level)
        self._queue.popleft()
        if queued.refusal:
            queued.promise.set_exception(queued.refusal)
        else:
            queued.promise.set_result(replies)


def rank_commands(command: Command | ResetPrefixCache) -> list[RankCommand]:
    """Rounds of a command, each of which all ranks execute; none for a command that the core executes alone."""
    match command:
        case ResetPrefixCache():
            return []
        case SwapWeights(checkpoint, load_format):
            prepare = [PrepareSwap(checkpoint, load_format, stage) for stage in (False, True)]
            return [*prepare, FinishSwap(take=True)]
    return [command]


def level_after(command: Command | ResetPrefixCache, level: int) -> int:
    """Level of sleep after a command, 0 for awake. Raises RequestError if the command cannot follow `level`."""
    match command:
        case Sleep() if level:
            raise RequestError(
                f"the engine sleeps already, at level {level}; call wake_up first to change the level",
                code="asleep-already",
            )
        case Sleep(wanted):
            if wanted not in LEVELS:
                raise RequestError(
                    f"level is {wanted!r}; it must be 1 (weights stay in the host's memory) or 2 (they are dropped)",
                    param="level",
                    code="unknown-sleep-level",
                )
            return wanted
        case Wake():
            if not level:
                raise RequestError("the engine is awake; only one that sleeps can be woken", code="awake-already")
            return 0
    return level
