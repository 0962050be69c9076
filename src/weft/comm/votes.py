"""Votes: what the ranks of a group ask each other before they begin what only all of them together can do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from weft.errors import Cause, EngineError

POLL_S = 0.005
HINT = "its process is stopped, or something in it does not come back; restart, or look at what it printed"


class Votes:
    """`ranks` are the plan's numbers of the group's, `rank` is this one's. The store is the group's own."""

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, patience: timedelta) -> None:
        self._store, self._ranks, self._rank, self._patience = store, ranks, rank, patience

    def objection(self, question: str, mine: str) -> str:
        """The first one that a rank has, "" where none has any. `mine` is this rank's. Raises EngineError, in the name
        of the other rank, where one does not answer in time."""
        self._store.set(f"{question}/{self._rank}", mine)
        found = [self._answer(question, rank) for rank in self._ranks]
        return next((f"{answer} (rank {rank})" for rank, answer in zip(self._ranks, found, strict=True) if answer), "")

    def _answer(self, question: str, rank: int) -> str:
        key, patience_s = f"{question}/{rank}", self._patience.total_seconds()
        deadline = time.monotonic() + patience_s
        # Not the store's own wait: that of a file counts in seconds.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise EngineError(
                    Cause(rank, "start", f"the others have waited {patience_s:g} s for it to {question}", HINT)
                )
            time.sleep(POLL_S)
        return self._store.get(key).decode()
