"""Recorded steps: scenarios drawn by seed, and digests of all that the core sends to the ranks and to its callers.

`python -m tests.pure.recorded_steps` plays all scenarios and writes tests/data/recorded_steps.json. The digests there
were made before policies became components of the scheduler: a digest is written anew only for a change of behaviour
that is wanted. Only `create_core` knows how schedulers are made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec

from tests.pure.scheduling import DRAFT, layout
from weft.engine.core import engine
from weft.engine.core.commands import Command, Replies, ResetPrefixCache, Sleep, Wake
from weft.engine.core.engine import EngineCore
from weft.engine.core.grammar import Matcher
from weft.engine.core.groups import GroupedScheduler
from weft.engine.core.identity import PLAIN, RequestIdentity
from weft.engine.core.kv import KVManager
from weft.engine.core.pace import FairPace, Pace
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import (
    Admission,
    EngineStep,
    LockStep,
    LockStepResult,
    Pooling,
    SlotFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from weft.engine.core.token_ids import TokenIds
from weft.engine.core.view import SchedulerSettings
from weft.errors import QueueFullError, RequestError
from weft.plan.plan import Speculation

RECORDED = Path(__file__).parents[1] / "data/recorded_steps.json"
POLICIES = ("fcfs", "priority", "fair")
SEEDS = 160  # scenarios of each policy
VOCAB = 13
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (None,), (None, None), (1,), (9,), (7, None), (None, 5, 16)]
SALTED = RequestIdentity(cache_salt="salt")


class Settings(msgspec.Struct, kw_only=True):
    """The limits of a scenario's schedulers, one for each of `groups` attention groups."""

    policy: str
    groups: int
    stages: int
    lookahead: bool
    windows: tuple[int | None, ...]
    states: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int
    max_model_len: int
    prefix_caching: bool
    counted: bool
    growth: int
    speculation: Speculation | None
    paced: bool
    grammars: bool


def create_core(settings: Settings, executor: Any, clock: Callable[[], float], grammars: Grammars | None) -> EngineCore:
    """The core of a scenario."""

    def create_scheduler() -> Scheduler:
        chunk = settings.max_num_batched_tokens
        kv = KVManager(
            layout(settings.windows, block_size=settings.block_size, chunk=chunk, states=settings.states),
            settings.num_blocks,
            max_num_seqs=settings.max_num_seqs,
            caching=settings.prefix_caching,
            counted=settings.counted,
        )
        kv.growth = settings.growth
        limits = SchedulerSettings(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_queued=settings.max_num_queued,
            max_model_len=settings.max_model_len,
            stages=settings.stages,
            policy=settings.policy,
            lookahead=settings.lookahead,
            speculation=settings.speculation,
        )
        return Scheduler(limits, kv, grammars)

    groups = [create_scheduler() for _ in range(settings.groups)]
    pace = FairPace if settings.policy == "fair" else Pace
    return EngineCore(
        groups[0] if len(groups) == 1 else GroupedScheduler(groups),
        executor,
        depth=settings.stages + settings.lookahead,
        pace=pace(clock, settings.max_num_batched_tokens) if settings.paced else None,
        grammars=grammars,
    )


def draw_settings(random: Random, policy: str) -> Settings:
    """The settings of a scenario, crowded more often than not."""
    groups = random.choice([1, 1, 1, 1, 2, 3])
    stages = random.choice([1, 1, 1, 2, 3])
    ahead = random.choice(["", "", "lookahead", "lookahead", "lookup", "draft"])
    if (ahead == "lookahead" and stages > 1) or (ahead == "draft" and groups > 1):
        ahead = ""
    lookup = Speculation(tokens=random.randint(1, 4), lookup_min=random.randint(1, 2), lookup_max=3)
    drafts = {"lookup": lookup, "draft": Speculation(tokens=3, draft=DRAFT)}
    windows = random.choice(WINDOWS)
    slots = random.choice([1, 2, 4, 6, 12, 32])
    caching = random.random() < 0.7
    crowded = random.random() < 0.7
    # A state that has read a rejected draft token cannot go back.
    states = 0 if ahead in drafts else random.choice([0, 0, 0, 1])
    return Settings(
        policy=policy,
        groups=groups,
        stages=stages,
        lookahead=ahead == "lookahead",
        windows=windows,
        states=states,
        block_size=random.choice([1, 2, 4, 4]),
        num_blocks=(random.randint(4, 40) if crowded else random.randint(100, 600)) * len(windows),
        max_num_seqs=slots,
        max_num_batched_tokens=random.choice([slots, 16, 40, 64, 256]),
        max_num_queued=random.choice([0, 3, 20, 1000, 1000, 1000]),
        max_model_len=random.choice([24, 60, 120]),
        prefix_caching=caching,
        counted=not caching and not states and random.random() < 0.5,
        growth=random.choice([1, 1, 1, 8, 64]),
        speculation=drafts.get(ahead),
        paced=random.random() < 0.6,
        grammars=random.random() < 0.4,
    )


def draw_request(random: Random, id: str, settings: Settings) -> Request:
    """A request whose prompt may begin as others do. Few are too long."""
    longest = min(settings.max_model_len, 60)
    own = random.randrange(longest) if random.random() < 0.8 else 0
    prompt = [random.randrange(2)] * random.randint(1, 12) + [random.randrange(VOCAB) for _ in range(own)]
    owner = random.randrange(4)
    pooling = Pooling() if random.random() < 0.1 else None
    grammar = "g" if settings.grammars and pooling is None and random.random() < 0.4 else ""
    most = random.choice([None, 1, *range(2, 50, 3)])
    params = SamplingParams(
        max_tokens=most,
        min_tokens=random.choice([0, 0, 3]) if most is None or most > 3 else 0,
        prompt_logprobs=0 if random.random() < 0.1 else None,
        logprobs=0 if random.random() < 0.1 else None,
        presence_penalty=0.5 if random.random() < 0.1 else 0.0,
        stop_token_ids=(VOCAB - 1,) if random.random() < 0.1 else (),
    )
    answered = [1] * random.randint(1, 4) if most is None and not grammar and random.random() < 0.2 else []
    return Request(
        id=id,
        prompt=TokenIds.pack(prompt[: settings.max_model_len]),
        params=params,
        key=random.getrandbits(20),
        stop_ids=(VOCAB - 1,) if params.stop_token_ids else (VOCAB - 2,) if random.random() < 0.2 else (),
        priority=random.randrange(3),
        identity=SALTED if random.random() < 0.1 else PLAIN,
        answered=TokenIds.pack(answered),
        grammar=grammar,
        pooling=pooling,
        owner=owner,
        weight=(1.0, 1.0, 3.0, 0.5)[owner],
    )


def sampled_token(key: int, position: int) -> int:
    """The token at a position of a text. It repeats what came before, with exceptions."""
    mixed = (key * 2654435761 + position * 40503) >> 4
    return (key + position % (3 + key % 4) + (mixed % 9 == 0)) % VOCAB


class FakeMatcher:
    """A matcher that takes any token, and ends or fails after a number of tokens."""

    def __init__(self, ends: int, fails: int) -> None:
        self.accepted, self._ends, self._fails = 0, ends, fails

    @property
    def ended(self) -> bool:
        return self.accepted >= self._ends

    @property
    def error(self) -> str | None:
        return "too many items" if self.accepted >= self._fails else None

    def accept(self, token: int) -> None:
        self.accepted += 1

    def count_valid(self, tokens: Sequence[int]) -> int:
        return next((number for number, token in enumerate(tokens) if token == 5), len(tokens))


class Grammars:
    """Grammars that are compiled when `finish_some` is called."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._compiling: list[Future[Matcher]] = []

    def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        self._compiling.append(future)
        return future

    def finish_some(self) -> None:
        """Finish compilations in the order in which they began, some with an error."""
        while self._compiling and self._random.random() < 0.5:
            future = self._compiling.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            if self._random.random() < 0.1:
                future.set_exception(RequestError("no such grammar", param="structured_outputs", code="no-grammar"))
            else:
                future.set_result(FakeMatcher(self._random.randint(1, 40), self._random.choice([5, 99, 99, 99])))

    def masks(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> list[bytes]:
        return [bytes([matcher.accepted % 256, *drafts]) for matcher, drafts in rows]


class KeyedRanks:
    """The ranks of one group: each token depends on its request's key and its position alone."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._slots: dict[int, Admission] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """The result of a plan. Now and then a row fails."""
        for admission in plan.admitted:
            self._slots[admission.slot] = admission
        result = StepResult(plan.id, [], [], {})
        requests = plan.draft_requests or [0] * len(plan.slots)
        rows = zip(plan.slots, plan.starts, plan.counts, plan.samples, plan.draft_counts, requests, strict=True)
        for slot, start, count, samples, drafted, requested in rows:
            admission, end = self._slots[slot], start + count
            self._read_prompt(result, admission, start, end)
            if not samples:
                continue
            positions = range(end - drafted, end + 1)
            tokens = [sampled_token(admission.key, position) for position in positions]
            result.tokens += tokens
            wanted = admission.params.logprobs is not None
            result.logprobs += [TokenLogprobs(-0.5, token, [], []) if wanted else None for token in tokens]
            if requested and self._random.random() < 0.8:
                # The drafts after the row, if all of its own are accepted.
                guesses = [sampled_token(admission.key, end + 1 + number) for number in range(requested)]
                result.drafts[slot] = [*guesses[:-1], guesses[-1] + (self._random.random() < 0.3)]
        if plan.slots and self._random.random() < 0.01:
            result.failed[self._random.choice(plan.slots)] = SlotFailure("nan-logits", "logits are NaN")
        return result

    def _read_prompt(self, result: StepResult, admission: Admission, start: int, end: int) -> None:
        prompt = admission.prompt
        if admission.params.prompt_logprobs is not None and not admission.output:
            known = range(start, min(end, len(prompt) - 1))
            result.prompt_logprobs[admission.slot] = [TokenLogprobs(-1.0, place, [], []) for place in known]
        if admission.pooling is not None and end == len(prompt) + len(admission.output):
            result.pooled[admission.slot] = end.to_bytes(4, "little")


class Scenario:
    """A core with requests, aborts, commands and failures drawn by a seed, on a clock of its own."""

    def __init__(self, policy: str, seed: int) -> None:
        self._random = Random(f"{policy} {seed}")
        self.settings = draw_settings(self._random, policy)
        self.now_s = 100.0
        self.steps = 0
        self._digest = sha256()
        self._ranks = [KeyedRanks(self._random) for _ in range(self.settings.groups)]
        self._grammars = Grammars(self._random) if self.settings.grammars else None
        self._token_s = self._random.choice([1e-5, 2e-4, 2e-3, 2e-2])
        self._costs_s: list[float] = []
        self._left = self._random.randint(40, 160)  # requests still to come
        self._burst = self._random.choice([0.05, 0.3, 1.0])
        self._ids: list[str] = []
        with patch.object(engine, "monotonic", lambda: self.now_s):
            self.core = create_core(self.settings, self, lambda: self.now_s, self._grammars)

    def play(self) -> str:
        """Play the scenario to its end. Returns its digest."""
        with patch.object(engine, "monotonic", lambda: self.now_s):
            while self._left or self._is_busy():
                self._change()
                self.core.pump()
                self._record(self.core.take_uncompiled())
                if self.core.pending:
                    self.now_s += self._costs_s.pop(0)
                    self._record(self.core.finish_oldest())
                else:
                    self.now_s += 0.01
        stats = self.core.stats()
        self._record(stats)
        return self._digest.hexdigest()[:16]

    def _is_busy(self) -> bool:
        stats = self.core.stats()
        return bool(stats.running or stats.waiting or self.core.pending)

    def _change(self) -> None:
        """Let requests arrive, others go, grammars be ready and commands begin."""
        random = self._random
        if self._left and (random.random() < self._burst / 4 or not self._is_busy()):
            for _ in range(random.randint(1, 1 + int(20 * self._burst))):
                self._arrive()
        if self._grammars:
            self._grammars.finish_some()
        if self._ids and random.random() < 0.02:
            self.core.abort([random.choice(self._ids), "nobody"])
        if random.random() < 0.004:
            self.core.call(ResetPrefixCache())
        if random.random() < 0.004:
            self.core.call(Sleep(1))
            self.core.call(Wake())
        if random.random() < 0.01:
            self.now_s += 70.0

    def _arrive(self) -> None:
        if not self._left:
            return
        self._left -= 1
        id = f"r{self._left}"
        try:
            self.core.add(draw_request(self._random, id, self.settings))
            self._ids.append(id)
        except (QueueFullError, RequestError) as error:
            self._record(error.code)

    def _record(self, value: Sequence[Output] | EngineStep | object) -> None:
        self._digest.update(msgspec.msgpack.encode(value))

    # As an executor

    def submit(self, step: EngineStep) -> Future[Any]:
        """A step that is done at once; its time passes when it is finished."""
        self.steps += 1
        self._record(step)
        plans = step.plans if isinstance(step, LockStep) else [step]
        results = [ranks.execute(plan) for ranks, plan in zip(self._ranks, plans, strict=True)]
        slow = 20 if self._random.random() < 0.02 else 1
        self._costs_s.append(slow * (0.01 + self._token_s * max(len(plan.tokens) for plan in plans)))
        future: Future[Any] = Future()
        future.set_result(LockStepResult(results) if isinstance(step, LockStep) else results[0])
        return future

    def call(self, command: Command) -> Future[Replies]:
        """A command that is done at once."""
        future: Future[Replies] = Future()
        future.set_result([])
        return future


def record() -> None:
    """Play all scenarios and write their digests."""
    recorded: dict[str, dict[str, str]] = {}
    for policy in POLICIES:
        recorded[policy], steps = {}, 0
        for seed in range(SEEDS):
            scenario = Scenario(policy, seed)
            recorded[policy][str(seed)] = scenario.play()
            steps += scenario.steps
        print(f"{policy}: {steps} steps", file=sys.stderr)
    RECORDED.write_text(json.dumps(recorded, indent=0) + "\n")


if __name__ == "__main__":
    record()
