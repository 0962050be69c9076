"""Finding: a fault that a diagnosis rule has found, with the limits of the rules and the change that helps."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from weft.plan.parallelism import Parallelism


class Code(StrEnum):
    """The faults that are diagnosed."""

    ALLREDUCE_WAIT = "allreduce_wait"
    STRAGGLER = "straggler"
    STAGE_IMBALANCE = "stage_imbalance"
    KV_STARVED = "kv_starved"
    PREEMPTION_STORM = "preemption_storm"
    PREFIX_UNUSED = "prefix_unused"
    BATCH_SMALL = "batch_small"
    THROTTLED = "throttled"
    FOREIGN_MEMORY = "foreign_memory"
    SLOW_CLIENT = "slow_client"


class RuleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the rules. Shares are from 0 to 1.

    - `window_s`: what is true of a moment has to be true for so long; only counts of rare events go back further.
    - `steps`, `busy_s`, `seconds`: fewer steps, less time within steps, or a shorter history tell nothing.
    - `exchange`: share of a step that even the slowest rank of a stage spends with the others.
    - `straggler`: a rank's time within steps without waiting, times the median of the others of its stage.
    - `delayed`: share of a rank's steps in which its core has other work, and `delayed_more` times the median of the
      others of its stage.
    - `imbalance`: share of the slowest stage's time that another split would save. `prompt_tokens`: of a step, on
      average; with more of them the work of the head is not known.
    - `starved`: share of the steps before which a request did not find room in the KV cache.
    - `preemptions`: preempted requests for each that ended or runs. `fewest_preemptions`: fewer are no storm.
    - `prompts`: fewer tell nothing about prefixes; `repeated`: share of them that begin like an earlier one; `hits`:
      share of their common tokens that the cache should have had.
    - `batch_room`: share of the KV cache that is free while requests wait only because of --max-num-seqs.
    - `clock`: share of its highest clock that a GPU under load should have.
    - `foreign`: share of a GPU's memory that other processes hold.
    - `unread_s`: seconds in which a client takes nothing of its answer.
    """

    window_s: float = 20.0
    steps: int = 50
    busy_s: float = 1.0
    seconds: float = 5.0
    exchange: float = 0.5
    straggler: float = 1.5
    delayed: float = 0.25
    delayed_more: float = 2.0
    imbalance: float = 0.15
    prompt_tokens: float = 1.0
    starved: float = 0.5
    preemptions: float = 0.2
    fewest_preemptions: int = 4
    prompts: int = 48
    repeated: float = 0.4
    hits: float = 0.25
    batch_room: float = 0.5
    clock: float = 0.85
    foreign: float = 0.05
    unread_s: float = 5.0


LIMITS = RuleLimits()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the deployment that a rule proposes; fields that stay as they are are empty.

    `parallelism` has the parts of the cut that change.
    `speeds` are the measured speeds of the ranks for the same work, by local rank, the fastest 1. `requests` is the
    number of requests that run at once before and after.
    """

    replica: int = 0
    parallelism: Parallelism = Parallelism()
    speeds: tuple[float, ...] = ()
    requests: tuple[int, int] | None = None
    freed_bytes: int = 0

    @property
    def as_pipeline(self) -> bool:
        """True if a pipeline of single ranks takes the place of tensor parallelism."""
        return self.parallelism.tensor_parallel == 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: its code, a sentence with the figure, the figure and its limit, what helps, and the change itself.

    - `ranks`: those at fault, numbered over all replicas; empty for a fault of the whole server. `stage`: the pipeline
      stage at fault.
    - `alternative`: what helps if the planner expects nothing of the change.
    - `follows_from`: the fault that explains this one, see `monitor.causes`.
    """

    code: Code
    text: str
    value: float
    limit: float
    remedy: str
    ranks: tuple[int, ...] = ()
    stage: int | None = None
    change: Change | None = None
    alternative: str = ""
    follows_from: Code | None = None
