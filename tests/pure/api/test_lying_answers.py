"""A node that proves the key and answers wrongly, before the ranks start."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.pure.engine.test_nodes import FINE
from tests.pure.joining import facts
from tests.pure.machines import host
from tests.refusals import refuses
from weft.engine.cluster import assembly, joined_node, preflight
from weft.engine.cluster.messages import (
    Join,
    ListenForPeers,
    ListeningForPeers,
    Measured,
    MeasureTo,
    Speed,
    TellTime,
    Time,
)
from weft.engine.processes import framing
from weft.errors import ConfigError

KEY = b"a" * 32


class Joined:
    """A node that answers each question as the test says, with its real report."""

    def __init__(self, number: int, answers: dict[type, object]) -> None:
        self.facts, self._answers = facts(number), answers

    def ask(self, question: object) -> object:
        return self._answers[type(question)]


TRUE: dict[type, object] = {
    TellTime: Time(0.0),
    MeasureTo: Measured(msgspec.structs.replace(FINE, problem="", round_trip_s=1e-4, bytes_per_s=1e9)),
    ListenForPeers: ListeningForPeers(1),
}
LIES: list[dict[type, object]] = [
    {TellTime: ListeningForPeers(1)},
    {MeasureTo: Time(0.0)},
    {ListenForPeers: Time(0.0)},
    *({ListenForPeers: ListeningForPeers(port)} for port in (-1, 0, 65536, 2**40)),
    *(
        {MeasureTo: Measured(Speed(first=1, second=0, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s))}
        for round_trip_s, bytes_per_s in ((float("nan"), 1.0), (-1.0, 1.0), (1.0, float("inf")), (1.0, 0.0))
    ),
]


@pytest.mark.parametrize("lies", LIES, ids=lambda lies: str(*lies.values()))
def test_an_answer_that_cannot_be_is_an_error_that_names_the_node(
    monkeypatch: pytest.MonkeyPatch, lies: dict[type, object]
) -> None:
    monkeypatch.setattr(assembly.time, "time", lambda: 0.0)
    settings: Any = SimpleNamespace(key=KEY, certificate="", allow_public=False)
    own, node = facts(0, address="127.0.0.1"), cast(Any, Joined(1, TRUE | lies))
    with refuses(ConfigError, "wrong-answer", "node 1"):
        assembly.check_nodes(own, [node], settings, "fetch")


def test_a_speed_is_that_of_the_pair_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = SimpleNamespace(key=KEY, certificate="", allow_public=False)
    fine = msgspec.structs.replace(FINE, problem="")
    monkeypatch.setattr(assembly, "measure_network", lambda *_: fine)
    lie = Measured(Speed(first=-7, second=10**9, problem="nowhere"))
    node = cast(Any, Joined(1, TRUE | {MeasureTo: lie}))
    speeds = assembly.measure_all(facts(0, address="127.0.0.1"), [node], settings)
    assert [(speed.first, speed.second) for speed in speeds] == [(1, 0)]


def test_an_answer_has_one_deadline_however_slowly_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte would begin the limit of a socket anew."""
    clock = [100.0]
    monkeypatch.setattr(framing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(joined_node, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    own, theirs = socket.socketpair()
    with own, theirs:
        theirs.sendall(framing.encode_frame(Join(facts(1), 0)))
        node = joined_node.JoinedNode(own)

        class Slow:
            """The node's connection: a byte comes, and nearly all of the limit has passed."""

            def __getattr__(self, name: str) -> Any:
                return getattr(own, name)

            def recv(self, size: int) -> bytes:
                clock[0] += 0.9 * joined_node.ASK_S
                return b"\1"

        node._channel.socket = cast(Any, Slow())
        with refuses(ConfigError, "node-not-answering", "node 1"):
            node.ask(TellTime())
        assert clock[0] <= 100.0 + 2 * joined_node.ASK_S


def test_a_report_of_any_size_is_not_read() -> None:
    own, theirs = socket.socketpair()
    with own, theirs:
        theirs.sendall(framing.LENGTH.pack(joined_node.JOIN_FRAME + 1))
        with pytest.raises(framing.FrameError) as caught:
            joined_node.JoinedNode(own)
        assert caught.value.code == "message-too-large"


def test_a_node_s_name_is_cut_and_moves_no_cursor() -> None:
    name = preflight.label(facts(1, host=host(hostname="\x1b[2J" + "x" * 10_000)))
    assert "\x1b" not in name and len(name) < 400
