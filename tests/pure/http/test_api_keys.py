"""Keys of a server's clients: who comes in, with which models, how often, and under which name in the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.pure.worlds import HI, FakeEngine, Wire, World, endless, error_codes, in_pieces
from tests.refusals import refuses
from weft.api.server.server import check_keys
from weft.config import EngineConfig
from weft.engine.core.identity import RequestIdentity
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request
from weft.engine.core.token_ids import TokenIds
from weft.errors import ConfigError
from weft.http.clients import Client
from weft.http.errors import HttpError
from weft.http.key_file import ClientKey, read_keys
from weft.http.key_rates import KeyRates, RequestCount
from weft.http.options import ServeOptions

Written = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> str:
        path = tmp_path / "keys.yaml"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    return write


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


REQUESTS = {
    "/v1/chat/completions": {"model": "tiny", "messages": HI},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 9},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False},
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_rates_are_refused_in_the_shape_of_each_api(written: Written, path: str) -> None:
    world = World(api_key_file=written("[{name: a, key: one, rpm: 1}, {name: b, key: two}]"))
    assert (await world.post(path, REQUESTS[path], headers=by("one"))).status_code == 200
    with error_codes() as codes:
        refused = await world.post(path, REQUESTS[path], headers=by("one"))
    assert codes == ["rate-limit"] and refused.json()["error"]
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await world.post(path, REQUESTS[path], headers=by("two"))).status_code == 200
    assert (await world.post(path, REQUESTS[path], headers=by("three"))).status_code == 401


async def test_tokens_of_prompts_and_answers_count(written: Written) -> None:
    world = World(api_key_file=written("[{name: a, key: one, tpm: 10}]"))
    assert (await world.complete(prompt="a" * 11)).status_code == 401
    too_long = await world.post("/v1/completions", {"model": "tiny", "prompt": "a" * 11}, headers=by("one"))
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (429, "over_rate_limit")
    body = {"model": "tiny", "prompt": "ab"}  # 2 tokens, and 6 of "hello" and the end
    assert (await world.post("/v1/completions", body, headers=by("one"))).status_code == 200
    refused = await world.post("/v1/completions", {**body, "prompt": "abc"}, headers=by("one"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit")


async def test_a_request_that_tokens_forbid_is_none_of_the_minute_s_requests(written: Written) -> None:
    world = World(api_key_file=written("[{name: a, key: one, rpm: 1, tpm: 10}]"))
    for _ in range(3):
        refused = await world.post("/v1/completions", {"prompt": "a" * 11}, headers=by("one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "over_rate_limit")
    world.engine.full = True
    assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=by("one"))).status_code == 429
    world.engine.full = False
    assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=by("one"))).status_code == 200
    assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=by("one"))).status_code == 429


async def test_requests_without_a_prompt_count_when_they_end(written: Written) -> None:
    world = World(api_key_file=written("[{name: a, key: one, rpm: 1}]"))
    assert (await world.post("/tokenize", {"prompt": "ab"}, headers=by("one"))).status_code == 200
    assert (await world.post("/tokenize", {"prompt": "ab"}, headers=by("one"))).status_code == 429


def test_requests_that_are_read_at_once_share_the_limit() -> None:
    rates = KeyRates([ClientKey(name="a", key="one", rpm=2)])
    first, second, third = (RequestCount(rates, "a") for _ in range(3))
    first.enter()
    second.enter()
    with refuses(HttpError, "rate-limit", "2 requests"):
        third.enter()
    first.refuse()
    first.leave()
    third.enter()
    second.leave()
    with third.accepting(5):
        pass
    third.leave()
    with refuses(HttpError, "rate-limit", "2 requests"):
        first.enter()


@pytest.mark.parametrize("seed", range(40))
def test_after_the_time_told_there_is_room_and_not_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(seed)
    now = 1e6 + chance.uniform(0, 60)
    monkeypatch.setattr(time, "time", lambda: now)
    limit = chance.choice([1, 3, 60, 60_000])
    rates = KeyRates([ClientKey(name="a", key="one", tpm=limit)])
    told: int | None = None
    while told is None:
        cost = chance.randint(1, limit)
        try:
            rates.test("a", tokens=cost)
            rates.count_prompt("a", cost)
            now += chance.uniform(0, 40) / min(limit, 9)
        except HttpError as error:
            told = error.retry_after_s
    assert told is not None and 1 <= told <= 120
    refused_at = now
    if told > 1:
        now = refused_at + told - 1.01
        with pytest.raises(HttpError):
            rates.test("a", tokens=cost)
    now = refused_at + told
    rates.test("a", tokens=cost)


async def test_requests_at_once(written: Written) -> None:
    engine = FakeEngine(in_pieces("a"))
    world = World(engine, api_key_file=written("[{name: a, key: one, concurrent: 1}]"))
    engine.awake.clear()
    first = asyncio.create_task(world.post("/v1/completions", {"prompt": "ab"}, headers=by("one")))
    while not engine.requests:
        await asyncio.sleep(0)
    second = await world.post("/v1/completions", {"prompt": "ab"}, headers=by("one"))
    assert second.status_code == 429 and second.headers["retry-after"] == "1"
    engine.awake.set()
    assert (await first).status_code == 200
    assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=by("one"))).status_code == 200


async def test_a_key_sees_and_uses_its_models_only(written: Written) -> None:
    path = written("[{name: a, key: one, models: [x]}, {name: b, key: two}]")
    world = World(api_key_file=path, served_model_name=("x", "y"))

    async def listed(key: str) -> list[str]:
        rows = (await world.client.get("/v1/models", headers=by(key))).json()["data"]
        tags = (await world.client.get("/api/ps", headers=by(key))).json()["models"]
        assert len(tags) == len(rows)
        return [row["id"] for row in rows]

    assert (await listed("one"), await listed("two")) == (["x"], ["x", "y"])
    large = "a" * 5000  # read in another thread
    for key, model, status in (("one", "x", 200), ("one", "y", 404), ("two", "y", 200)):
        answer = await world.post("/v1/completions", {"model": model, "prompt": "ab", "user": large}, headers=by(key))
        assert answer.status_code == status
        answer = await world.post("/api/generate", {"model": model, "prompt": "ab"}, headers=by(key))
        assert answer.status_code == status


@pytest.mark.parametrize("shared", [False, True])
async def test_requests_carry_their_owner_and_prefixes_are_its_own(written: Written, shared: bool) -> None:
    hashed = sha256(b"two").hexdigest()
    path = written(f"[{{name: a, key: one, weight: 3}}, {{name: b, sha256: {hashed}}}]")
    world = World(api_key_file=path, prefix_cache_per_key=not shared)
    for key, salt in (("one", None), ("two", None), ("two", "s"), ("one", None)):
        body = {"model": "tiny", "prompt": "ab", "cache_salt": salt}
        assert (await world.post("/v1/completions", body, headers=by(key))).status_code == 200
    first, second, salted, again = world.engine.requests
    assert [(one.owner, one.weight) for one in (first, second)] == [(1, 3.0), (2, 1.0)]
    assert first.identity == again.identity != salted.identity != second.identity
    assert (first.identity == second.identity) is shared


async def test_nobody_s_requests_have_no_owner() -> None:
    world = World(api_key=("one",))
    assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=by("one"))).status_code == 200
    assert world.engine.requests[0].identity.cache_salt is None  # one key alone shares with nobody
    assert (await World().complete()).status_code == 200


async def test_a_key_of_the_file_may_administrate(written: Written) -> None:
    world = World(api_key_file=written("[{name: a, key: one}, {name: ops, key: two, admin: true}]"))
    for key, status in (("one", 401), ("two", 200), ("none", 401)):
        assert (await world.client.get("/is_sleeping", headers=by(key))).status_code == status


@pytest.mark.parametrize("open_listing", [False, True])
async def test_listings_from_this_machine_may_be_open(written: Written, open_listing: bool) -> None:
    world = World(api_key_file=written("[{name: a, key: one}]"), open_listing=open_listing)
    here, elsewhere = {"host": "127.0.0.1:8000"}, {"host": "127.0.0.1:8000", "x-forwarded-for": "10.0.0.1"}
    for path in ("/v1/models", "/v1/models/tiny", "/api/tags"):
        assert (await world.client.get(path, headers=here)).status_code == (200 if open_listing else 401)
        assert (await world.client.get(path, headers=elsewhere)).status_code == 401
    assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=here)).status_code == 401


def test_a_salt_keeps_the_rest_of_an_identity() -> None:
    identity = RequestIdentity(adapter="b", content=(b"picture",), cache_salt="s")
    request = Request(id="1", prompt=TokenIds.pack([1]), params=SamplingParams(), stop_ids=(), identity=identity)
    signed = Client("a", 1, salt="own").sign(request).identity
    assert (signed.adapter, signed.content) == ("b", (b"picture",)) and signed.cache_salt != "s"


async def test_a_request_ends_at_its_timeout() -> None:
    world = World(FakeEngine(endless), request_timeout=0.01)
    answer = await world.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    wire = Wire(world, "/v1/completions", {"model": "tiny", "prompt": "ab", "stream": True})
    assert '"code":"request_timeout"' in await wire.text(until="0.01 s")
    await wire.task
    assert not world.engine.open and not world.service.streams


def test_a_file_that_others_may_read(written: Written) -> None:
    path = written("[{name: a, key: one}]")
    Path(path).chmod(0o644)
    with refuses(ConfigError, "open-key-file", path, "0644", "chmod 600"):
        read_keys(path)
    hashed = written(f"[{{name: a, sha256: {'ab' * 32}}}]")
    Path(hashed).chmod(0o644)  # of which nobody learns a key
    assert [key.name for key in read_keys(hashed)] == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        "- name: a\n  key:\tsk-secret\n\tx: 1",
        "- {name: a, key: @sk-secret}",
        "- {name: a, key: `sk-secret}",
        "- {name: a, key: *sk-secret}",
        "- {name: a, key: !sk-secret x}",
        "- {sk-secret: a, sk-secret: b}",
        "- {name: a, key: sk-secret",
        '- {name: a, key: "sk-secret\\q"}',
        "- {name: a, key: sk-secret\0}",
    ],
)
def test_a_faulty_line_with_a_key_is_not_shown(written: Written, text: str) -> None:
    path = written(text)
    with refuses(ConfigError, "config-not-yaml", path) as refused:
        read_keys(path)
    assert "secret" not in str(refused.value)
    assert "\0" in text or "line" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        ("[{name: a, key: x, wieght: 2}]", {}, "unknown-field"),
        ("[{name: a, key: x, quota: {day: 5}}]", {}, "quota-without-ledger"),
        ("[{name: a, key: x, weight: 2}]", {}, "weight-without-policy"),
        (f"[{{name: a, key: x}}, {{name: b, sha256: {sha256(b'x').hexdigest()}}}]", {}, "duplicate-key"),
        ("[{name: a, key: x, rpm: 1}]", {"api_key": ("y", "x")}, "duplicate-key"),
        ("[{name: a, key: x, rpm: 1}]", {"admin_key": "x"}, "duplicate-key"),
        ("", {"open_listing": True, "api_key_file": None}, "listing-without-keys"),
    ],
)
def test_files_of_which_a_server_could_not_keep_its_word(
    written: Written, text: str, options: dict[str, Any], code: str
) -> None:
    given = ServeOptions(**{"api_key_file": written(text)} | options)
    with refuses(ConfigError, code):
        check_keys(EngineConfig(model="m"), given)
