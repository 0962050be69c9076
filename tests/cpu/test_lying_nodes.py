"""A node that proves the key and lies: the engine ends with one cause, and nothing waits or grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_worker import HERE, make_plan, make_step
from test_node_ranks import WAIT_S, connected, over_nodes

from tests.cpu.families import family
from weft.engine.core.commands import Done
from weft.engine.core.step import StepResult
from weft.engine.executors import nodes
from weft.engine.executors.messages import (
    Allocated,
    Capturing,
    CommandDone,
    FromRank,
    Listening,
    Loaded,
    Loading,
    PhaseEntered,
    StepDone,
)
from weft.engine.executors.node_messages import (
    Beat,
    MeetAt,
    NodeSocket,
    OtherNodes,
    PassOn,
    RankMessage,
    RankState,
    StartRanks,
    ToNode,
)
from weft.engine.executors.nodes import NodesExecutor
from weft.engine.processes import beats
from weft.engine.processes.framing import LENGTH, Channel
from weft.errors import CORE, Cause, EngineError
from weft.plan.memory import Capacity
from weft.plan.wiring import Tcp

RESULT = StepResult(0, [1], [None], {})


def capacity(number: int, **lies: Any) -> Capacity:
    sizes = {"weight_bytes": 1, "activation_bytes": 1, "free_bytes": 1 << 30, "block_bytes": 256, "load_s": 0.1}
    return Capacity(**{"rank": number, "host": "there", "device": "cpu", **sizes, **lies})


class Liar:
    """The head's executor, and the other node's end of the connection, on which the test says what it likes.

    Both ranks are there.
    """

    def __init__(self) -> None:
        ours, self._theirs = connected()
        about = NodeSocket(1, "there", "127.0.0.1", ours.detach())
        self.executor = NodesExecutor(OtherNodes("127.0.0.1", "lo", (about,)), HERE)
        self.channel: Channel[Any] = Channel(self._theirs, ToNode)
        self._messages = (message for message in self.channel if isinstance(message, StartRanks | MeetAt | PassOn))
        self.error: BaseException | None = None
        self._start = threading.Thread(target=self._try_start)

    def _try_start(self) -> None:
        try:
            self.executor.start(over_nodes(make_plan(tensor=2), 1, 1))
        except EngineError as error:
            self.error = error

    def begin(self) -> None:
        """Begin the start, as far as to the place where ranks load."""
        self._start.start()
        assert isinstance(next(self._messages), StartRanks)
        self.say(0, Listening(Tcp("127.0.0.1", 1)))
        assert isinstance(next(self._messages), MeetAt)

    def start(self) -> None:
        """Tell the truth until the ranks are ready."""
        self.begin()
        for rank in range(2):
            self.say(rank, Loaded(capacity(rank)))
        assert isinstance(next(self._messages), PassOn)
        for rank in range(2):
            self.say(rank, Allocated())
        self._start.join(WAIT_S)
        assert self.error is None

    def say(self, rank: int, message: FromRank) -> None:
        self.channel.send(RankMessage(rank, message))

    def cause(self) -> Cause:
        return self.executor.failure.result(WAIT_S)

    def close(self) -> None:
        self.executor.close()
        self._start.join(WAIT_S)
        assert not self._start.is_alive()
        self.channel.close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()
    assert family() == [] and not [one for one in threading.enumerate() if one.name.startswith("weft-node")]


@pytest.mark.parametrize("rank", [-1, 2, 2**62])
def test_a_rank_that_the_node_does_not_have(liar: Liar, rank: int) -> None:
    liar.start()
    pending = liar.executor.submit(make_step(0, [1]))
    liar.say(rank, StepDone(RESULT))
    cause = liar.cause()
    assert cause.code == "unexpected-message" and str(rank) in cause.cause and "node 1" in cause.cause
    with pytest.raises(EngineError):
        pending.result(WAIT_S)


LIES: dict[str, FromRank] = {
    "a result without a step": StepDone(RESULT),
    "a reply without a command": CommandDone(Done()),
    "a second report": Loaded(capacity(1)),
    "a second end of the start": Allocated(),
    "another address of rank 0": Listening(Tcp("10.0.0.9", 1)),
    "the progress of another rank": Loading(7, 1, 2),
    "the graphs of another rank": Capturing(0, 1, 2),
}


@pytest.mark.parametrize("message", LIES.values(), ids=LIES.keys())
def test_messages_that_nobody_has_asked_for(liar: Liar, message: FromRank) -> None:
    """None is kept: a queue that nobody reads any more would grow."""
    liar.start()
    liar.say(1, message)
    cause = liar.cause()
    assert (cause.rank, cause.code) == (1, "unexpected-message")
    assert type(message).__name__ in cause.cause or "Result" in cause.cause or "Done" in cause.cause


@pytest.mark.parametrize(
    "lies",
    [{"rank": 0}, {"rank": 5}, {"block_bytes": 0}, {"block_bytes": -(2**20)}, {"weight_bytes": -1}],
    ids=str,
)
def test_a_report_that_cannot_be_true_starts_nothing(liar: Liar, lies: dict[str, int]) -> None:
    """The number of KV blocks of all ranks is computed from it."""
    liar.begin()
    liar.say(0, Loaded(capacity(0)))
    liar.say(1, Loaded(capacity(1, **lies)))
    assert liar.cause().code == "unexpected-message"
    liar._start.join(WAIT_S)
    assert isinstance(liar.error, EngineError)


def test_a_report_of_the_wrong_phase_ends_the_start(liar: Liar) -> None:
    liar.begin()
    liar.say(0, Allocated())
    liar._start.join(WAIT_S)
    assert isinstance(liar.error, EngineError) and liar.error.cause.code == "unexpected-message"
    assert liar.error.cause.rank == CORE


def test_beats_of_other_ranks_do_not_hide_the_silence(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head says of which ranks it has heard last."""
    for name in ("SILENCE_S", "STACKS_S", "BEAT_S"):
        monkeypatch.setattr(beats, name, 0.05)
        if hasattr(nodes, name):
            monkeypatch.setattr(nodes, name, 0.05)
    liar.start()
    liar.channel.send(Beat([RankState(99, "step", 1), RankState(-5, "step", 1), RankState(1, "step", 3)]))
    cause = liar.cause()
    assert cause.code == "node-silent" and "99" not in cause.cause and "-5" not in cause.cause


def test_a_phase_is_cut_and_figures_of_progress_are_bounded(liar: Liar) -> None:
    liar.start()
    liar.say(1, PhaseEntered("x" * 100_000))
    liar.say(1, Loading(1, 2**62, 1))
    liar.say(1, StepDone(RESULT))
    assert len(liar.cause().phase) <= 40
    assert liar.executor._reading._share() == 1.0


RAW: dict[str, Callable[[], bytes]] = {
    "no message": lambda: LENGTH.pack(3) + b"\xc1\xc1\xc1",
    "too long": lambda: LENGTH.pack(2**32 - 1),
    "nested": lambda: LENGTH.pack(100_000) + b"\x91" * 100_000,
    "another type": lambda: LENGTH.pack(9) + b"\x82\xa4type\xa1x\xa1",
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
def test_bytes_that_are_no_message(liar: Liar, raw: Callable[[], bytes]) -> None:
    liar.start()
    liar.channel.send_frame(raw())
    assert liar.cause().code == "node-lost"
