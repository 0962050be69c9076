"""Packed token ids: a prompt is a few objects from the tokenizer to the step that admits it, however long it is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from tests.pure.engine.test_frontend import BOS, frontend
from tests.pure.scheduling import LIMITS, Engine, request
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request
from weft.engine.core.token_ids import TokenIds
from weft.engine.processes.framing import FrameDecoder, encode_frame
from weft.engine.replicas.messages import AddRequests, ToCore

LENGTH, PROMPTS = 2000, 20
IDS = [1000 + number for number in range(LENGTH)]  # the interpreter keeps integers up to 256 for good


def kept_objects(make: Callable[[], object]) -> int:
    """Small objects of the interpreter's heap that the result of `make` keeps."""
    gc.collect()
    before = sys.getallocatedblocks()
    kept = make()
    gc.collect()
    count = sys.getallocatedblocks() - before
    del kept
    return count


def test_ids_come_back() -> None:
    ids = TokenIds.pack([0, 1, 256, 2**31 - 1])
    assert list(ids) == [0, 1, 256, 2**31 - 1] and len(ids) == 4 and len(ids.packed) == 16
    assert not TokenIds.pack([]) and list(TokenIds.pack([])) == []
    with pytest.raises(OverflowError):
        TokenIds.pack([2**31])


def test_a_message_of_prompts_is_four_bytes_an_id_and_few_objects() -> None:
    requests = [Request(id=str(n), prompt=TokenIds.pack(IDS), params=SamplingParams()) for n in range(PROMPTS)]
    frame = encode_frame(AddRequests(requests))
    assert len(frame) < PROMPTS * (4 * LENGTH + 1000)
    decoder: FrameDecoder[ToCore] = FrameDecoder(ToCore)
    assert kept_objects(lambda: list(decoder.feed(frame))) < 50 * PROMPTS
    assert list(decoder.feed(frame)) == [AddRequests(requests)]


def test_prompts_that_wait_are_few_objects() -> None:
    limits = {**LIMITS, "num_blocks": 1024, "max_model_len": 2 * LENGTH, "max_num_batched_tokens": 1, "max_num_seqs": 1}
    engine = Engine(limits)
    waiting = [request(str(number), [number, *IDS], max_tokens=1) for number in range(PROMPTS)]

    def add_all() -> None:
        for item in waiting:
            engine.scheduler.add(item)
        assert engine.schedule()  # the first is unpacked

    assert kept_objects(add_all) < LENGTH + PROMPTS * 100
    assert engine.scheduler.table.waiting == PROMPTS - 1


def test_tokenized_prompts_are_few_objects() -> None:
    front = frontend(max_model_len=10 * LENGTH)
    texts = ["a" * LENGTH] * PROMPTS
    parsed = [front.parse_prompt(text).ids for text in texts]
    assert {len(ids.packed) for ids in parsed} == {4 * (LENGTH + 1)}

    def collect() -> list[object]:
        prompts = [front.parse_prompt([259] * LENGTH) for _ in range(PROMPTS)]
        return [front.create_collector(prompt, SamplingParams(), arrival_s=0.0) for prompt in prompts]

    assert kept_objects(collect) < 100 * PROMPTS


def test_the_caller_gets_a_list() -> None:
    front = frontend()
    collector = front.create_collector(front.parse_prompt("ab"), SamplingParams(), arrival_s=0.0)
    assert collector.output.prompt_token_ids == [BOS, 97, 98]
