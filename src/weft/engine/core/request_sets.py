"""RequestSets: the requests of a scheduler by state: waiting, running, ready for a step, in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Literal

from msgspec.structs import replace

from weft.engine.core.drafts import discard_drafts
from weft.engine.core.grammar import Grammars, Matcher
from weft.engine.core.kv import KVManager
from weft.engine.core.request import Request, Stats, check_prompt_length, duplicate_id_error, queue_full_error
from weft.engine.core.sequence import Flight, Sequence
from weft.engine.core.speculation import DraftProposer
from weft.engine.core.waiting import OrderedQueue
from weft.plan.plan import Speculation

by_order = attrgetter("order")


class RequestSets:
    """The requests that a scheduler has accepted and that have not ended, with their slots and blocks.

    The parameters are described in `Scheduler`.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_queued: int,
        max_model_len: int,
        stages: int,
        policy: Literal["fcfs", "priority"],
        lookahead: bool = False,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_queued = max_num_queued
        self.max_model_len = max_model_len
        # A lone request may outgrow a small cache. It ends there, as if it reached the model's length.
        self._longest = kv.layout.longest(kv.num_blocks, max_model_len)
        self.stages = stages
        self.lookahead = lookahead
        self.speculation = speculation
        self.speculating = True
        self.grammars = grammars
        self._by_priority = policy == "priority"
        self._arrivals = 0
        self._steps = 0
        self._unfinished: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        # Running requests with something to compute, longest idle first.
        self._ready: deque[Sequence] = deque()
        self._queue = OrderedQueue()
        # Pooling requests without slot and blocks: the step that ends their prompts, their last step, is in flight.
        self._pooling: set[str] = set()
        # Waiting requests that are not in the queue: their adapter or grammar is not ready yet.
        self._unprepared: dict[str, Sequence] = {}
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: deque[Flight] = deque()
        # Ids of the requests for which the last scheduled step is the first.
        self.started: list[str] = []
        # Prompt tokens of the last scheduled step, and the limit on them while other requests decode. In such steps,
        # CACHED_TOKENS tokens of the prefix cache count as one token.
        self.prompt_tokens = 0
        self.prompt_limit = max_num_batched_tokens
        # Limits of the policy "fair" on all tokens of a step: with a newcomer's prompt, and without. The initial value
        # does not limit: a full step has half of it.
        self.step_limit = self.busy_limit = 2 * max_num_batched_tokens
        # Tokens to compute of the shortest newcomer's prompt that the last scheduled step admitted; 0 without a
        # newcomer.
        self.newcomer_tokens = 0
        # True if requests of another attention group, which takes the same steps, await their next token.
        self.others_decode = False
        # True if the last step left a request in the queue although a slot was free, for lack of blocks.
        self._starved = False
        self._counters = Stats(blocks_total=kv.num_blocks)

    # Requests in and out

    def add(self, request: Request, *, prepared: bool = True) -> None:
        """Queue a request. Raises RequestError if it can never run, QueueFullError if too many wait.

        A request that is not `prepared` needs something that is still being loaded or compiled, such as an adapter. It
        waits until `mark_prepared`, and requests behind it go first. Its place in the queue is given by its arrival.
        """
        length = request.length
        if request.id in self._unfinished:
            raise duplicate_id_error(request.id)
        answers = request.pooling is None
        needed_blocks = self.kv.layout.blocks(length + answers)
        check_prompt_length(length, self.max_model_len, needed_blocks, self.kv.num_blocks, answers=answers)
        self._check_queue(request)
        order = (request.priority if self._by_priority else 0, self._arrivals)
        sequence = Sequence(request, order, self._longest)
        if self.speculation and answers and not request.params.needs_history:
            sequence.proposer = DraftProposer(self.speculation)
        self._arrivals += 1
        self._unfinished[request.id] = sequence
        if prepared:
            self._queue.push(sequence)
        else:
            self._unprepared[request.id] = sequence

    def _check_queue(self, request: Request) -> None:
        """Raise QueueFullError if no further request may wait."""
        if self.waiting >= self.max_num_queued + len(self._slots):
            raise queue_full_error(self.waiting, self.max_num_queued)

    def mark_prepared(self, id: str, matcher: Matcher | None = None) -> None:
        """Let a request run that was added unprepared. Other and unknown ids are ignored.

        `matcher` belongs to the request's grammar.
        """
        if sequence := self._unprepared.pop(id, None):
            sequence.matcher = matcher
            self._queue.push(sequence)

    def knows(self, id: str) -> bool:
        """Return True for a request that has not ended."""
        return id in self._unfinished

    def abort(self, ids: Iterable[str]) -> None:
        """Forget these requests at once, and drop the tokens that steps in flight bring for them.

        Unknown ids are ignored.
        """
        waiting = self.waiting
        for id in ids:
            if sequence := self._unfinished.get(id):
                self._unprepared.pop(id, None)
                self._finish(sequence)
        if self.waiting < waiting:
            self._queue.discard_done()

    def preempt_all(self) -> None:
        """Preempt all running requests, which compute their KV again once they are admitted. No step is in flight."""
        assert not self._in_flight
        for sequence in list(self._running.values()):
            self._preempt(sequence)

    def reset_prefix_cache(self) -> None:
        """Let no request reuse blocks that were filled before. Running requests keep theirs."""
        self.kv.forget_content()

    @property
    def running(self) -> Collection[str]:
        """Ids of the running requests."""
        return self._running.keys()

    @property
    def waiting(self) -> int:
        """Number of waiting requests, prepared or not."""
        return len(self._unfinished) - len(self._running) - len(self._pooling)

    @property
    def active(self) -> int:
        """Number of requests that run, plus those waiting that are prepared and for which a slot is free."""
        return len(self._running) + min(self.waiting - len(self._unprepared), len(self._slots))

    @property
    def decodes(self) -> bool:
        """True if a running request awaits its next token."""
        if len(self._running) > len(self._ready):
            return True
        return any(len(sequence.tokens) + sequence.pending - sequence.computed == 1 for sequence in self._ready)

    @property
    def blocks_used(self) -> int:
        """Number of KV blocks in use."""
        return self.kv.used

    def stats(self) -> Stats:
        """Return a copy of the gauges and counters."""
        return replace(
            self._counters,
            running=len(self._running) + len(self._pooling),
            waiting=self.waiting,
            blocks_used=self.blocks_used,
            step_sizes=list(self._counters.step_sizes),
        )

    # Leaving

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._discard_ready(sequence)
        self._stop_running(sequence)
        if sequence.proposer:
            # After its readmission it samples a token before the draft model's next tokens arrive.
            discard_drafts(sequence)
        self._queue.push(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.done = True
        self._discard_ready(sequence)
        del self._unfinished[sequence.request.id]
        self._pooling.discard(sequence.request.id)
        if sequence.slot >= 0:
            self._stop_running(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Finish a request whose last step has brought its end. If it was preempted since, it leaves the queue."""
        waits = sequence.slot < 0 and sequence.request.id not in self._pooling
        self._finish(sequence)
        if waits:
            self._queue.discard_done()

    def _stop_running(self, sequence: Sequence) -> None:
        """Release a running sequence's slot and blocks."""
        del self._running[sequence.request.id]
        self.kv.close_tables(sequence)
        self._released.append(sequence.slot)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _discard_ready(self, sequence: Sequence) -> None:
        if sequence.ready:
            sequence.ready = False
            self._ready.remove(sequence)

    def _await_turn(self, sequence: Sequence) -> None:
        if not sequence.ready:
            sequence.ready = True
            self._ready.append(sequence)
