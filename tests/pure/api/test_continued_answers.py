"""`return_token_ids` and `continue_token_ids` over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.pure.letters import BOS, END
from tests.pure.worlds import FakeEngine, World, error_codes, events, refused, saying
from weft.engine.core.request import Output, Request


def resuming(text: str) -> Any:
    """Say `text` as `saying` does, from behind what is answered."""
    whole = saying(text)

    def script(request: Request) -> Iterable[Output]:
        return list(whole(request))[len(request.answered) :]

    return script


def world(said: str = "hello", **options: Any) -> World:
    return World(FakeEngine(resuming(said)), **options)


def choices(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of chunks that carry tokens, without the prompt's ids."""
    found = [choice for event in seen for choice in event["choices"] if choice.get("token_ids")]
    return [{name: value for name, value in choice.items() if name != "prompt_token_ids"} for choice in found]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True}], ids=str)
@pytest.mark.parametrize("count", [1, 3, 5])
async def test_a_completion_goes_on_as_if_it_had_not_broken(count: int, fields: dict[str, Any]) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **fields}
    whole = events(await world().complete(**asked))
    ids = [id for choice in choices(whole) for id in choice["token_ids"]]
    assert ids == [*b"hello", END] and whole[0]["choices"][0]["prompt_token_ids"] == [BOS, *b"ab"]
    rest = events(await world().complete(**asked, continue_token_ids=ids[:count]))
    assert choices(rest) == choices(whole)[count:] and len(rest) == len(ids) - count + 1
    assert rest[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"] == len(ids)


async def test_a_chat_goes_on_without_its_role() -> None:
    whole = events(await world().chat(stream=True, return_token_ids=True))
    assert whole[0]["prompt_token_ids"] and "prompt_token_ids" not in whole[1]
    rest = events(await world().chat(stream=True, return_token_ids=True, continue_token_ids=[*b"he"]))
    assert [event["choices"] for event in rest] == [event["choices"] for event in whole[3:]]


async def test_without_the_fields_nothing_is_added() -> None:
    for made in (await world().chat(), await world().complete(stream=True)):
        assert "token_ids" not in made.text


async def test_whole_answers_have_the_ids_too() -> None:
    chat, completion = [await ask(return_token_ids=True) for ask in (world().chat, world().complete)]
    assert chat.json()["choices"][0]["token_ids"] == [*b"hello", END] and chat.json()["prompt_token_ids"]
    choice = completion.json()["choices"][0]
    assert choice["token_ids"] == [*b"hello", END] and choice["prompt_token_ids"] == [BOS, *b"ab"]


async def test_an_empty_list_begins_an_answer_without_the_prompt_s_ids() -> None:
    body = {"stream": True, "return_token_ids": True, "continue_token_ids": []}
    key = {"Authorization": "Bearer k"}
    kept = world(api_key=("k",))
    for made in (await world().chat(**body), await kept.post("/v1/completions", {"prompt": "ab", **body}, headers=key)):
        assert "prompt_token_ids" not in made.text
        assert [id for choice in choices(events(made)) for id in choice["token_ids"]] == [*b"hello", END]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"continue_token_ids": [300]}, "token-id-out-of-range"),
        ({"continue_token_ids": [-1]}, "token-id-out-of-range"),
        ({"continue_token_ids": [65], "stream": False}, "continuation-not-possible"),
        ({"continue_token_ids": [65], "prompt": ["a", "b"]}, "continuation-not-possible"),
        ({"continue_token_ids": [65], "n": 2}, "continuation-not-possible"),
        ({"continue_token_ids": [65] * 5, "max_tokens": 5}, "nothing-to-continue"),
        ({"continue_token_ids": "x"}, "invalid-field"),
        ({"continue_token_ids": [65] * 100}, "too-many-items"),
    ],
    ids=str,
)
async def test_continuations_that_are_refused(fields: dict[str, Any], code: str) -> None:
    with error_codes() as codes:
        refused(await world().complete(**{"stream": True, **fields}), 400)
    assert codes == [code]


async def test_a_server_with_keys_continues_for_its_administrator_only() -> None:
    body = {"prompt": "ab", "stream": True, "continue_token_ids": [*b"he"]}

    async def ask(key: str, **options: Any) -> Any:
        return await world(**options).post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})

    refused(await ask("api", api_key=("api",), admin_key="admin"), 401, code="invalid_admin_key")
    refused(await ask("api", api_key=("api",)), 403, code="admin_key_unset")
    assert events(await ask("admin", api_key=("api",), admin_key="admin"))
    assert events(await ask("anybody", admin_key="admin"))
