"""Golden answers from tokens to deltas: cut into tokens and steps anywhere, with stop strings, and moved elsewhere.

A step of several tokens is one whose drafts were accepted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken

from tests.pure.api.test_parsers import CASES, TOOLS, Said, format_of, parse
from tests.pure.letters import VOCAB
from weft.api.conversation.answer_ids import AnswerIds
from weft.api.conversation.chat_answer import ChoiceReader, ToolCallDelta
from weft.api.conversation.chat_prompt import PreparedChat
from weft.api.conversation.tools import ToolUse
from weft.api.parsers.choose import REASONING_FORMATS, TOOL_FORMATS
from weft.api.service.openai_types import ChatRequest
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.frontend import Frontend, Prompt, TextTools
from weft.engine.text.byte_level import ALPHABET, build_byte_level, spell_bytes
from weft.engine.text.pretokenizers import GPT2
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer import Tokenizer

SIZES = (1, 1, 2, 3, 5, 8, 13)  # bytes of a token
STEPS = {False: (1,), True: (1, 2, 3, 6)}  # tokens of a step, without and with accepted drafts
SHORT = 160  # characters of an answer that is cut at every byte in the shorter run of the tests
END = "<end of the answer>"
Case = dict[str, Any]


@cache
def vocabulary(family: str) -> tuple[Frontend, dict[bytes, int]]:
    """A model with each part of its family's golden answers as a token, and the family's marks as special ones."""
    texts = [case.values[1]["text"].encode() for case in CASES if case.values[0] == family]
    parts = {text[at : at + size] for text in texts for size in SIZES for at in range(len(text) - size + 1)}
    spelled = dict.fromkeys([*ALPHABET, *map(spell_bytes, sorted(parts))])
    hf_tokenizer = build_byte_level(
        {token: id for id, token in enumerate(spelled)}, [], GPT2.create_pre_tokenizer(), whole_words=False
    )
    marks = {mark for item in (TOOL_FORMATS[family], *REASONING_FORMATS.values()) for mark in item.marks}
    hf_tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*sorted(marks), END)])
    tokenizer = Tokenizer(hf_tokenizer, TokenizerSettings(tokens={"eos_token": END}))
    ids = {text: tokenizer.id(spell_bytes(text)) for text in {*parts, *(bytes([byte]) for byte in range(256))}}
    ids |= {mark.encode(): tokenizer.id(mark) for mark in marks}
    end = tokenizer.id(END)
    assert end is not None and None not in ids.values()
    front = Frontend(
        vocab=max(VOCAB, tokenizer.vocab_size), max_model_len=4096, eos=(end,), text_tools=TextTools(tokenizer)
    )
    return front, {text: id for text, id in ids.items() if id is not None}


class Stream(NamedTuple):
    """One way in which an answer comes: ids of its tokens, numbers of tokens per step, and those that are answered."""

    ids: list[int]
    steps: list[int]
    answered: int = 0
    stop: str | None = None
    kept: bool = False  # the stop string stays in the text


def cut_tokens(text: str, family: str, draw: random.Random) -> list[int]:
    """Ids of a text that is cut anywhere, also within characters. A mark is often its special token."""
    _, ids = vocabulary(family)
    marks = [mark.encode() for mark in TOOL_FORMATS[family].marks]
    data, made = text.encode(), []
    while data:
        mark = next((mark for mark in marks if data.startswith(mark)), b"")
        piece = mark if mark and draw.random() < 0.6 else data[: draw.choice(SIZES)]
        if piece not in ids:
            piece = piece[:1]
        made.append(ids[piece])
        data = data[len(piece) :]
    return made


def draw_stop(text: str, draw: random.Random) -> str | None:
    """No stop string, one that the text nearly has, or one that it has."""
    at = draw.randrange(len(text) + 1)
    part = text[at : at + draw.choice((1, 2, 3, 5, 9))]
    return draw.choice((None, part + "\0", part or None))


def draw_stream(text: str, family: str, draw: random.Random, *, drafted: bool, stopped: bool, moves: bool) -> Stream:
    ids = cut_tokens(text, family, draw)
    stop = draw_stop(text, draw) if stopped else None
    # A stop string that has come ends the answer: nothing moves then.
    answered = draw.randrange(1, len(ids)) if moves and stop is None and len(ids) > 1 else 0
    steps = [draw.choice(STEPS[drafted]) for _ in ids]
    return Stream(ids, steps, answered, stop, kept=bool(stop) and draw.random() < 0.3)


def outputs(id: str, stream: Stream, end: int) -> Iterator[Output]:
    """The core's outputs after the answered tokens."""
    left = [*stream.ids[stream.answered :], end]
    for count in stream.steps:
        step, left = left[:count], left[count:]
        if step:
            yield Output(id, step, [None] * len(step), None if left else "stop")
    if left:
        yield Output(id, left, [None] * len(left), "stop")


class Heard:
    """A client, which puts an answer together from its deltas."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[Any]] = []

    def add(self, said: tuple[str, str, Sequence[ToolCallDelta]]) -> None:
        self.content += said[0]
        self.reasoning += said[1]
        for part in said[2]:
            if part.index == len(self.calls):
                assert part.id and part.name
                self.calls.append([part.id, part.name, ""])
            else:
                assert part.index == len(self.calls) - 1 and part.id is None and part.name is None
            self.calls[-1][2] += part.arguments

    def said(self) -> Said:
        return self.content, self.reasoning, [call[1:] for call in self.calls]


def hear(family: str, case: Case, stream: Stream) -> tuple[Heard, str | None]:
    """The answer as a client hears it, and the reason for which it ended."""
    front, _ = vocabulary(family)
    answer_format = format_of(family, case)
    params = SamplingParams(
        max_tokens=2048, stop=stream.stop or (), include_stop_str_in_output=stream.kept, temperature=0.0
    )
    prompt = Prompt(TokenIds.pack([65]), case.get("prompt", ""), answered=TokenIds.pack(stream.ids[: stream.answered]))
    collector = front.create_collector(prompt, params, arrival_s=0.0, shown=front.special_ids(answer_format.marks))
    prepared = PreparedChat(ChatRequest(messages=[]), "m", [collector], answer_format, ToolUse(TOOLS))
    reader = ChoiceReader(0, prepared.new_parser(case.get("prompt", "")), prepared, AnswerIds())
    heard, reason = Heard(), None
    for text in collector.begun:
        heard.add(reader.read_text(text, last=False))
    (request,) = collector.requests
    for output in outputs(request.id, stream, request.stop_ids[0]):
        delta = collector.add(output, 0.0)
        assert (delta is None) == (reason is not None)
        if delta is not None:
            last = delta.finish_reason is not None
            heard.add(reader.read_text(delta.text, last=last, cut=delta.interrupted))
            reason = reader.finish_reason(delta.finish_reason)
    whole = reader.choice
    calls = [[call.name, call.arguments] for call in whole.tool_calls]
    assert heard.said() == (whole.content, whole.reasoning, calls)
    return heard, reason


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_streams(family: str, case: Case, streams: Iterable[Stream]) -> None:
    """Each stream says what the parser says of the whole text, up to the stop string."""

    @lru_cache(maxsize=256)
    def parsed(text: str, cut: bool) -> Said:
        return parse(family, {**case, "calls": [{"partial": ""}] if cut else []}, [text])

    for stream in streams:
        text = case["text"]
        at = text.find(stream.stop) if stream.stop else -1
        if stream.stop and at >= 0:
            text = text[: at + len(stream.stop) * stream.kept]
        content, reasoning, calls = parsed(text, at >= 0)
        heard, reason = hear(family, case, stream)
        assert heard.said() == (content, reasoning, [call[1:] for call in calls]), stream
        assert all(call[0] in (None, id) for call, (id, *_) in zip(calls, heard.calls, strict=True))
        assert reason == ("tool_calls" if calls and is_json(calls[-1][2]) else "stop")


def drawn_streams(family: str, case: Case, number: int) -> Iterator[Stream]:
    """Streams in turn without and with accepted drafts, and with stop strings; some move to another server."""
    draw = random.Random(case["name"])
    for at in range(number):
        drafted, stopped = bool(at & 1), bool(at & 2)
        yield draw_stream(case["text"], family, draw, drafted=drafted, stopped=stopped, moves=at % 3 == 0)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_and_steps_of_an_answer_do_not_matter(family: str, case: Case) -> None:
    check_streams(family, case, drawn_streams(family, case, 16))


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.long] * (len(case.values[1]["text"]) > SHORT))
        for case in CASES
    ],
)
def test_an_answer_may_be_cut_at_every_byte(family: str, case: Case) -> None:
    """A token ends there, a step, or what another server has answered."""
    _, ids = vocabulary(family)
    data, size = case["text"].encode(), max(SIZES)

    def ids_of(part: bytes) -> list[int]:
        pieces = [part[at : at + size] for at in range(0, len(part), size)]
        return [id for piece in pieces for id in ([ids[piece]] if piece in ids else [ids[bytes([b])] for b in piece])]

    def streams() -> Iterator[Stream]:
        for at in range(1, len(data)):
            before, after = ids_of(data[:at]), ids_of(data[at:])
            yield Stream(before + after, [len(before), len(after)])
            yield Stream(before + after, [len(after)], answered=len(before))

    check_streams(family, case, streams())


@pytest.mark.long
@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_ten_thousand_streams_of_a_family(family: str) -> None:
    cases = [case.values[1] for case in CASES if case.values[0] == family]
    for case in cases:
        check_streams(family, case, drawn_streams(family, case, -(-10_000 // len(cases))))
