"""Answers of the HTTP application: chats, completions, tokens and names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from httpx import Response

from tests.pure.letters import output
from tests.pure.worlds import HI, FakeEngine, Wire, World, events, refused, saying
from weft.engine.core.identity import RequestIdentity
from weft.engine.core.request import Output, Request
from weft.engine.core.step import SlotFailure, TokenLogprobs
from weft.engine.frontend.text_tools import TextTools

# Chat


async def test_a_chat_completion() -> None:
    world = World()
    answer = (await world.chat()).json()
    choice = answer["choices"][0]
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "hello"
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    prompt = len(world.engine.requests[0].prompt)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    # As long as the model allows, where nothing is said.
    assert world.engine.requests[0].params.max_tokens == 64 - prompt


async def test_a_chat_stream() -> None:
    chunks = events(await World().chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "hello"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 6 + ["stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert all(c["usage"] is None for c in chunks[:-1])


async def test_usage_only_where_asked_and_in_every_chunk_where_asked() -> None:
    assert all(c["choices"] and c["usage"] is None for c in events(await World().chat(stream=True)))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in events(await World().chat(stream=True, stream_options=options))]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 6


async def test_choices_of_a_stream_are_told_apart() -> None:
    chunks = events(await World().chat(stream=True, n=3))
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "hello"
        assert mine[-1]["finish_reason"] == "stop"


async def test_chat_logprobs() -> None:
    world = World(FakeEngine(saying("é")))
    entry = {"top_logprobs": [{"token": "A", "logprob": -0.1, "bytes": [65]}]}
    whole = (await world.chat(logprobs=True, top_logprobs=1)).json()
    half = "é".encode()
    content = whole["choices"][0]["logprobs"]["content"]
    # The engine of letters says bytes: each token is half of the character, and its bytes are told exactly.
    assert content[0] == {"token": "\ufffd", "logprob": -half[0] / 1000, "bytes": [half[0]], **entry}
    chunks = events(await world.chat(logprobs=True, top_logprobs=1, stream=True))
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    plain = (await world.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]
    assert plain["top_logprobs"] == []


async def test_minus_infinity_is_a_number_in_json() -> None:
    def script(request: Request) -> Iterable[Output]:
        yield Output(request.id, [97], [TokenLogprobs(float("-inf"), 9, [], [])], "length")

    answer = await World(FakeEngine(script)).chat(logprobs=True)
    assert answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_a_request_that_the_model_cannot_answer_is_a_500_that_says_so() -> None:
    def script(request: Request) -> Iterable[Output]:
        yield Output(
            request.id, [], [], "error", error=SlotFailure("nan-logits", "rank 1: the model produced NaN logits")
        )

    world = World(FakeEngine(script))
    answer = await world.chat()
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["message"] == "rank 1: the model produced NaN logits"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_grammar_that_fails_in_the_core_is_the_request_s_fault(begun: bool) -> None:
    failure = SlotFailure("grammar-failed", "the answer's grammar failed: too large", "structured_outputs")

    def script(request: Request) -> Iterable[Output]:
        if begun:
            yield output(request.id, "h")
        yield Output(request.id, [], [], "error", error=failure)

    world = World(FakeEngine(script))
    refused(await world.chat(), 400, type="invalid_request_error", param="structured_outputs")
    wire = Wire(world, "/v1/chat/completions", {"messages": HI, "stream": True})
    text = await wire.text(until="grammar failed")
    assert "invalid_request_error" in text and '"finish_reason":"' not in text
    wire.hang_up()
    await wire.task


async def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    world = World()
    answer = (await world.chat(stop=["l"])).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"], answer["stop_reason"]) == ("he", "stop", "l")
    assert world.engine.aborted == [world.engine.requests[0].id]


async def test_a_choice_that_is_cut_does_not_go_on_while_others_do() -> None:
    aborted: list[str] = []

    def script(request: Request) -> Iterable[Output]:
        if request.id.endswith("-0"):
            yield from (output(request.id, letter) for letter in "hell no")
        else:
            yield from (output(request.id, letter) for letter in "abcdef")
            aborted.extend(world.engine.aborted)
            yield output(request.id, "g", "length")

    world = World(FakeEngine(script))
    choices = (await world.chat(n=2, stop="ll")).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["he", "abcdefg"]
    assert aborted == [world.engine.requests[0].id]


async def test_template_kwargs_of_request_and_server() -> None:
    async def prompt(world: World, **fields: Any) -> bytes:
        await world.chat(**fields)
        return bytes(token for token in world.engine.requests[-1].prompt if token < 256)

    assert (await prompt(World(), chat_template_kwargs={"shout": True})).endswith(b"assistant:LOUD")
    world = World(default_chat_template_kwargs={"shout": True})
    assert (await prompt(world)).endswith(b"LOUD")
    assert (await prompt(world, chat_template_kwargs={"shout": False})).endswith(b"assistant:")
    assert (await prompt(World(), add_generation_prompt=False)).endswith(b"hi")
    assert (await prompt(World(), continue_final_message=True)).endswith(b"user:hi")


async def test_fields_reach_the_sampler() -> None:
    world = World()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_completion_tokens": 4}
    more = {"repetition_penalty": 1.1, "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2, "priority": 5}
    await world.chat(**fields, **more, logit_bias={"65": 1.5}, presence_penalty=0.3, frequency_penalty=0.2)
    request = world.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.5, 0.9, 5, 0.1, 4)
    assert (params.repetition_penalty, params.min_tokens, request.stop_ids) == (1.1, 2, (7,))
    assert (params.logit_bias, params.presence_penalty, params.frequency_penalty) == ({65: 1.5}, 0.3, 0.2)
    assert request.priority == 5
    assert request.identity == RequestIdentity()


@pytest.mark.parametrize("ask", [World.chat, World.complete])
async def test_a_cache_salt_reaches_the_core(ask: Callable[..., Awaitable[Response]]) -> None:
    world = World()
    assert (await ask(world, cache_salt="team 7")).status_code == 200
    assert [request.identity for request in world.engine.requests] == [RequestIdentity(cache_salt="team 7")]


# Completions


async def test_a_completion() -> None:
    world = World()
    answer = (await world.complete(max_tokens=3)).json()
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == "hel"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (await world.complete()).json()["choices"][0]["text"] == "hello"
    assert world.engine.requests[-1].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [b"a"]),
        (["a", "bc"], [b"a", b"bc"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_prompts_of_every_kind(prompt: Any, prompts: list[bytes]) -> None:
    world = World()
    answer = (await world.complete(prompt=prompt, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert [bytes(t for t in r.prompt if t < 256) for r in world.engine.requests[::2]] == prompts
    chunks = events(await world.complete(prompt=prompt, n=2, stream=True))
    said = dict.fromkeys(range(2 * len(prompts)), "")
    for chunk in chunks:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert set(said.values()) == {"hello"}


async def test_special_tokens_only_where_wanted() -> None:
    world = World()
    await world.complete()
    await world.complete(add_special_tokens=False)
    assert [len(request.prompt) for request in world.engine.requests] == [3, 2]


async def test_completion_logprobs() -> None:
    answer = (await World().complete(max_tokens=2, logprobs=2)).json()["choices"][0]["logprobs"]
    assert answer == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.104, -0.101],
        "tokens": ["h", "e"],
        "top_logprobs": [{"h": -0.104, "A": -0.1, "B": -0.2}, {"e": -0.101, "A": -0.1, "B": -0.2}],
    }
    chunks = events(await World().complete(max_tokens=2, logprobs=2, stream=True))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]


async def test_echo() -> None:
    assert (await World().complete(echo=True)).json()["choices"][0]["text"] == "abhello"
    chunks = events(await World().complete(echo=True, stream=True, prompt=[97]))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ahello"


async def test_scoring_a_prompt() -> None:
    def script(request: Request) -> Iterable[Output]:
        assert request.params.prompt_logprobs == 1
        entries = [TokenLogprobs(-0.5, 1, [token], [-0.5]) for token in list(request.prompt)[1:]]
        yield output(request.id, "x", "length", prompt_logprobs=entries)

    answer = (await World(FakeEngine(script)).complete(prompt=[97, 98], echo=True, max_tokens=0, logprobs=1)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "ab" and answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}]


# Tokens


async def test_tokenize_and_back() -> None:
    world = World()
    made = (await world.post("/tokenize", {"prompt": "hi"})).json()
    assert made == {"count": 3, "max_model_len": 64, "tokens": [256, 104, 105]}
    assert (await world.post("/tokenize", {"prompt": "hi", "add_special_tokens": False})).json()["count"] == 2
    assert (await world.post("/tokenize", {"prompt": "x" * 50_000})).json()["count"] == 50_001
    talk = (await world.post("/tokenize", {"messages": HI})).json()
    assert (await world.post("/detokenize", {"tokens": talk["tokens"]})).json() == {
        "prompt": "<bos><s>user:hi<e><s>assistant:"
    }
    refused(await world.post("/tokenize", {}), param="prompt")
    refused(await world.post("/detokenize", {"tokens": [9999]}), param="tokens")


async def test_without_a_tokenizer_ids_are_served() -> None:
    world = World(text_tools=TextTools())
    answer = (await world.complete(prompt=[97], logprobs=1, max_tokens=2)).json()
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 2
    refused(await world.chat(), param="messages")


async def test_grammars_are_compiled_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of work has been quick so far, and the body is tiny; nothing of a grammar runs in the server even so."""
    world = World(FakeEngine(saying("{}")))
    monkeypatch.setattr("llguidance.LLMatcher", None)
    for _ in range(2):
        await world.complete()
        assert (await world.complete(structured_outputs={"choice": ["yes", "no"]})).status_code == 200
    assert (await world.complete(structured_outputs={"regex": "("})).json()["error"]["param"] == "structured_outputs"
    assert len(world.engine.requests) == 4


@pytest.mark.parametrize(
    "fields", [{"model": ""}, {"model": None}, {"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}]
)
async def test_fields_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    answer = (await World().chat(**fields)).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("tiny", "hello")


@pytest.mark.parametrize("text", ["hello", 'a "q" \\ \n\u0001 \u2028 é 😀 </script>'], ids=ascii)
async def test_events_that_are_made_in_the_shorter_way_are_the_same(text: str) -> None:
    """Token ids are asked for, and taken out again: such events are made one by one."""
    made = []
    for ids in (False, True):
        seen = events(await World(FakeEngine(saying(text))).chat(stream=True, n=2, return_token_ids=ids))
        for event in seen:
            event.pop("prompt_token_ids", None)
            for choice in event["choices"]:
                choice.pop("token_ids", None)
            event |= {"id": "", "created": 0}
        # With ids, a token of which no text is final yet has an event too.
        made.append([event for event in seen if event["choices"][0]["delta"] != {"content": ""}])
    assert made[0] == made[1] and len(made[0]) > 4
    assert all(list(event) == list(made[1][0]) for event in made[0])


async def test_the_blocks_of_the_cache_as_vllm_s_boards_read_them() -> None:
    world = World()
    labels = {"block_size": str(world.engine.plan.block_size), "num_gpu_blocks": "10", "cache_dtype": "auto"}
    assert await world.metric("vllm:cache_config_info", **labels, engine="0") == 1
