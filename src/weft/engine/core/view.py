"""SchedulerView: what policies and simulations read of a scheduler, which alone changes it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.engine.core.kv import KVManager
from weft.engine.core.table import RequestTable
from weft.plan.plan import Speculation


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and modes of a scheduler.

    At most `max_num_seqs` requests run, a step has at most `max_num_batched_tokens` tokens, and prompt and answer
    together have at most `max_model_len`. At most `max_num_queued` requests wait, not counting as many as there are
    free slots. With several pipeline `stages`, a step takes only its share of the requests, so that each stage has a
    step to work on. With `lookahead`, a request may take part in the next step before the token that it samples in this
    step is known: the ranks fill the token in. If the request ends with that token, the results of the next step are
    dropped. With `speculation`, a step verifies several draft tokens of an answer. `policy` is "fcfs", "priority" or
    "fair": it decides on the order of requests, see `StepPolicy`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int
    max_model_len: int
    stages: int
    policy: str
    lookahead: bool = False
    speculation: Speculation | None = None


class SchedulerView(NamedTuple):
    """A scheduler's settings, KV blocks and requests, to be read only."""

    settings: SchedulerSettings
    kv: KVManager
    table: RequestTable
