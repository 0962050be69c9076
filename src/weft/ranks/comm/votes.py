"""Votes with which the ranks of a group make sure that all can take part, before a step that only all can take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from weft.errors import Cause, EngineError

POLL_S = 0.005
HINT = "its process is stopped, or something in it does not come back; restart, or look at what it printed"


class Votes:
    """Votes of one group, through its `store`.

    `ranks` are the plan's rank numbers of the group, `rank` is this rank's. `timeout` is for each vote.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self._store, self._ranks, self._rank, self._timeout = store, ranks, rank, timeout

    def first_objection(self, question: str, own: str) -> str:
        """Give this rank's `own` objection to `question`, and return the first one of any rank.

        "" means no objection. Raises EngineError, in the name of the other rank, if one does not answer in time.
        """
        self._store.set(f"{question}/{self._rank}", own)
        answers = [(rank, self._wait_for_answer(question, rank)) for rank in self._ranks]
        return next((f"{answer} (rank {rank})" for rank, answer in answers if answer), "")

    def _wait_for_answer(self, question: str, rank: int) -> str:
        key, timeout_s = f"{question}/{rank}", self._timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        # Not the store's own wait: a store in a file polls once a second.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                cause = f"the others have waited {timeout_s:g} s for it to {question}"
                raise EngineError(Cause(rank=rank, phase="start", code="rank-not-answering", cause=cause, hint=HINT))
            time.sleep(POLL_S)
        return self._store.get(key).decode()
