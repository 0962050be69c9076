"""Frames: whatever the pieces in which they come, the messages are the same; nothing else comes through."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission, StepPlan, StepResult, TokenLogprobs
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.messages import Allocate, FromRank, PhaseEntered, RankFailed, RunStep, StepDone, ToRank
from weft.engine.processes import framing
from weft.engine.processes.framing import LENGTH, Channel, FrameDecoder, FrameError, encode_frame
from weft.errors import Cause

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
logprobs = st.builds(TokenLogprobs, st.floats(-99, 0), st.integers(1, 9), tokens, st.lists(st.floats(-99, 0)))
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), st.floats(-9, 9)),
    bad_words=st.lists(st.text(min_size=1)).map(tuple),
)
admissions = st.builds(
    Admission, st.integers(0, 255), st.integers(0, 2**64 - 1), params, tokens.map(TokenIds.pack), tokens
)
steps = st.builds(
    StepPlan,
    st.integers(-1, 2**40),
    tokens,
    st.lists(admissions, max_size=3),
    tokens,
    tokens,
    tokens,
    tokens,
    st.lists(st.lists(tokens, max_size=2), max_size=3),
    st.lists(st.booleans()),
    tokens,
    tokens,
)
results = st.builds(
    StepResult,
    st.integers(0, 2**40),
    tokens,
    st.lists(st.none() | logprobs, max_size=3),
    st.dictionaries(st.integers(0, 255), st.lists(logprobs, max_size=2), max_size=2),
    st.dictionaries(st.integers(0, 255), tokens, max_size=2),
)
to_rank = st.builds(RunStep, steps) | st.builds(Allocate, st.integers(0, 2**40))
from_rank = (
    st.builds(StepDone, results)
    | st.builds(PhaseEntered, st.text())
    | st.builds(RankFailed, st.builds(Cause, rank=st.integers(-1, 99), hint=st.text()), st.booleans())
)


@st.composite
def pieces(draw: st.DrawFn, messages: st.SearchStrategy[msgspec.Struct]) -> tuple[list[msgspec.Struct], list[bytes]]:
    """Messages, and their frames one after the other, cut anywhere."""
    sent = draw(st.lists(messages, max_size=5))
    stream = b"".join(map(encode_frame, sent))
    borders = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    return sent, [stream[a:b] for a, b in zip([0, *borders], [*borders, len(stream)], strict=True)]


@given(pieces(to_rank))
def test_whatever_the_pieces_to_a_rank(case: tuple[list[msgspec.Struct], list[bytes]]) -> None:
    sent, stream = case
    decoder: FrameDecoder[ToRank] = FrameDecoder(ToRank)
    assert [message for piece in stream for message in decoder.feed(piece)] == sent


@given(pieces(from_rank))
def test_whatever_the_pieces_from_a_rank(case: tuple[list[msgspec.Struct], list[bytes]]) -> None:
    sent, stream = case
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    assert [message for piece in stream for message in decoder.feed(piece)] == sent


@given(st.binary(max_size=60))
def test_noise_gives_nothing_or_an_error(noise: bytes) -> None:
    """Never another kind of exception, never something that is no message."""
    decoder: FrameDecoder[ToRank] = FrameDecoder(ToRank)
    with contextlib.suppress(FrameError):
        assert all(isinstance(message, ToRank) for message in decoder.feed(LENGTH.pack(len(noise)) + noise))


def test_a_frame_over_the_limit_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME", 100)
    assert encode_frame(PhaseEntered("x" * 50))
    with refuses(FrameError, "message-too-large") as refused:
        encode_frame(PhaseEntered("x" * 1000))
    assert re.search(r"\b1,0\d\d bytes.*\b100 bytes", str(refused.value))
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    with refuses(FrameError, "message-too-large") as refused:
        # The length is enough: the body is not waited for.
        list(decoder.feed(LENGTH.pack(101)))
    assert re.search(r"\b101 bytes.*\b100 bytes", str(refused.value))


def test_a_message_of_the_other_direction_is_not_known() -> None:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    with refuses(FrameError, "unknown-message") as refused:
        list(decoder.feed(encode_frame(Allocate(1))))
    assert "Allocate" in str(refused.value)


@pytest.fixture
def channels() -> Iterator[tuple[Channel[ToRank], Channel[ToRank]]]:
    ours, theirs = (Channel[ToRank](end, ToRank) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_more_than_a_socket_holds(channels: tuple[Channel[ToRank], Channel[ToRank]]) -> None:
    ours, theirs = channels
    step = StepPlan(1, [], [], [0], [0], [10**6], [123456] * 10**6, [[[1]]], [True], [0])
    sender = threading.Thread(target=lambda: (ours.send(RunStep(step)), ours.send(Allocate(7)), ours.hang_up()))
    sender.start()
    assert list(theirs) == [RunStep(step), Allocate(7)]
    sender.join()


@pytest.mark.parametrize("cut", [1, LENGTH.size, LENGTH.size + 1, -1])
def test_the_end_in_the_middle_of_a_frame_gives_no_message(
    channels: tuple[Channel[ToRank], Channel[ToRank]], cut: int
) -> None:
    ours, theirs = channels
    ours.send_frame(encode_frame(Allocate(7)) + encode_frame(Allocate(8))[:cut])
    ours.hang_up()
    assert list(theirs) == [Allocate(7)]


def test_an_end_with_bytes_unread_is_an_end(channels: tuple[Channel[ToRank], Channel[ToRank]]) -> None:
    """The system calls it a reset."""
    ours, theirs = channels
    theirs.send(Allocate(1))
    ours.close()
    assert list(theirs) == []
    with pytest.raises(OSError):
        theirs.send(Allocate(1))


def test_hanging_up_wakes_who_waits(channels: tuple[Channel[ToRank], Channel[ToRank]]) -> None:
    ours, _ = channels
    heard: list[ToRank] = []
    waiter = threading.Thread(target=lambda: heard.extend(ours))
    waiter.start()
    ours.hang_up()
    ours.hang_up()
    waiter.join(60)
    assert not waiter.is_alive()
    assert heard == []
