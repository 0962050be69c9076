"""The endpoints under the admin key, over an engine that notes the commands it gets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pure.worlds import PLAN, World, error_codes, refused
from weft.api.server.admin import ADMIN_ROUTES, MAX_TRACED_STEPS
from weft.engine.core.commands import Profile, RankStats, ResetPrefixCache, Sleep, TraceFile, Wake

KEY = {"Authorization": "Bearer secret"}
ENDPOINTS = [(method, route.path) for route in ADMIN_ROUTES for method in sorted((route.methods or set()) - {"HEAD"})]
every_endpoint = pytest.mark.parametrize(("method", "path"), ENDPOINTS, ids=lambda value: value)


async def ask(world: World, method: str, path: str, headers: dict[str, str] = KEY) -> httpx.Response:
    return await world.client.request(method, path, headers=headers)


async def sleeping(**options: Any) -> World:
    """A service whose engine sleeps."""
    world = World(admin_key="secret", **options)
    assert (await ask(world, "POST", "/sleep")).status_code == 200
    return world


def test_the_endpoints() -> None:
    assert ENDPOINTS == [
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/start_profile"),
        ("POST", "/stop_profile"),
        ("GET", "/profile"),
        ("GET", "/profile_trace"),
        ("GET", "/layout"),
    ]


@every_endpoint
async def test_without_an_admin_key_every_endpoint_is_refused(method: str, path: str) -> None:
    # An API key is no admin key.
    for headers in (KEY, {"Authorization": "Bearer api"}, {}):
        world = World(api_key=("api",))
        refused(await ask(world, method, path, headers), 403, code="admin_key_unset")
        assert not world.engine.called


@every_endpoint
@pytest.mark.parametrize(
    ("host", "peer", "headers"),
    [
        ("127.0.0.1:8000", "10.0.0.9", {}),
        ("weft.example", "127.0.0.1", {}),
        ("127.0.0.1", "127.0.0.1", {"X-Forwarded-For": "10.0.0.9"}),
        ("127.0.0.1", "127.0.0.1", {"Origin": "http://evil.example"}),
    ],
)
async def test_without_any_key_only_this_machine_may(
    method: str, path: str, host: str, peer: str, headers: dict[str, str]
) -> None:
    world = World()
    transport = httpx.ASGITransport(world.app, client=(peer, 9))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
        refused(await client.request(method, path, headers=headers), 403, code="admin_key_unset")
    assert not world.engine.called


async def test_without_any_key_this_machine_may() -> None:
    transport = httpx.ASGITransport(World().app, client=("127.0.0.1", 9))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        assert (await client.post("/sleep")).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}


@every_endpoint
@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}, {"x-api-key": "é"}, {"x-api-key": ""}],
    ids=str,
)
async def test_a_wrong_key_is_a_401(method: str, path: str, headers: dict[str, str]) -> None:
    world = World(admin_key="secret", api_key=("wrong",))
    given = {name: value.encode() for name, value in headers.items()}
    response = await world.client.request(method, path, headers=given)
    refused(response, 401, code="invalid_admin_key")
    assert not world.engine.called


@every_endpoint
@pytest.mark.parametrize("headers", [KEY, {"authorization": "bearer  secret"}, {"x-api-key": "secret"}], ids=str)
async def test_the_key_opens_every_endpoint(method: str, path: str, headers: dict[str, str], tmp_path: Path) -> None:
    world = World(admin_key="secret", profile_directory=str(tmp_path))
    if path == "/wake_up":
        await ask(world, "POST", "/sleep")
    answer = await ask(world, method, path, headers)
    assert answer.status_code == (404 if path == "/profile_trace" else 200), "there is no trace yet"


@every_endpoint
async def test_another_method_is_a_405(method: str, path: str) -> None:
    other = "GET" if method == "POST" else "POST"
    refused(await ask(World(admin_key="secret"), other, path), 405, code="method_not_allowed")


async def test_sleep_and_wake_up() -> None:
    world = World(admin_key="secret")
    for query, level in (("", 1), ("?level=1", 1), ("?level=2", 2)):
        assert (await ask(world, "GET", "/is_sleeping")).json() == {"is_sleeping": False}
        assert (await ask(world, "POST", f"/sleep{query}")).content == b""
        assert (await ask(world, "GET", "/is_sleeping")).json() == {"is_sleeping": True}
        assert (await ask(world, "POST", "/wake_up")).content == b""
        assert world.engine.called[-2:] == [Sleep(level), Wake()]
    assert (await ask(world, "GET", "/is_sleeping")).json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "code", "param"),
    [
        ("/sleep?level=0", "unknown-sleep-level", "level"),
        ("/sleep?level=3", "unknown-sleep-level", "level"),
        ("/sleep?level=-1", "no-whole-number", "level"),
        ("/sleep?level=one", "no-whole-number", "level"),
        ("/sleep?level=", "no-whole-number", "level"),
        ("/wake_up", "awake-already", None),
        ("/start_profile?steps=1.5", "no-whole-number", "steps"),
        (f"/start_profile?steps={MAX_TRACED_STEPS + 1}", "profile-steps", "steps"),
    ],
)
async def test_an_invalid_parameter_or_state_is_a_400(path: str, code: str, param: str | None) -> None:
    world = World(admin_key="secret")
    with error_codes() as codes:
        refused(await ask(world, "POST", path), param=param)
    assert codes == [code]
    assert not world.engine.called and not world.engine.stats.sleep_level


async def test_an_engine_that_sleeps_cannot_be_put_to_sleep() -> None:
    world = await sleeping()
    with error_codes() as codes:
        refused(await ask(world, "POST", "/sleep?level=2"))
    assert codes == ["asleep-already"] and world.engine.stats.sleep_level == 1


async def test_a_request_waits_while_the_engine_sleeps() -> None:
    world = await sleeping(progress_timeout=0.0)
    answer = asyncio.create_task(world.chat())
    while not world.engine.requests:
        await asyncio.sleep(0)
    await asyncio.wait([answer], timeout=0.01)
    assert not answer.done()
    # No step finishes while the engine sleeps, and it is healthy.
    assert (await world.client.get("/health")).status_code == 200
    assert (await ask(world, "POST", "/wake_up")).status_code == 200
    assert (await answer).json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_while_the_engine_sleeps_is_a_503_by_flag(stream: bool) -> None:
    world = await sleeping(refuse_while_asleep=True)
    for answer in (await world.chat(stream=stream), await world.complete(stream=stream)):
        refused(answer, 503, code="asleep")
        assert int(answer.headers["Retry-After"]) > 0
    assert not world.engine.requests
    await ask(world, "POST", "/wake_up")
    assert (await world.chat()).status_code == 200


async def test_the_prefix_cache_is_reset() -> None:
    world = World(admin_key="secret")
    assert (await ask(world, "POST", "/reset_prefix_cache")).content == b""
    assert world.engine.called == [ResetPrefixCache()]


async def test_traces_begin_and_end(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    world = World(admin_key="secret", profile_directory=str(folder))
    world.engine.reply = TraceFile("/traces/rank0.json.gz")
    for path, steps in (("/start_profile", MAX_TRACED_STEPS), ("/start_profile?steps=4", 4), ("/stop_profile", 0)):
        files = (await ask(world, "POST", path)).json()["files"]
        assert files == ["/traces/rank0.json.gz"] * 2
        assert world.engine.called[-1] == Profile(steps, str(folder))
    assert folder.is_dir()
    world.engine.reply = TraceFile("")  # nothing was traced
    assert (await ask(world, "POST", "/stop_profile")).json() == {"files": []}


async def test_traces_that_cannot_be_written_are_a_400(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    world = World(admin_key="secret", profile_directory=str(tmp_path / "file" / "traces"))
    with error_codes() as codes:
        refused(await ask(world, "POST", "/start_profile"), param="directory")
    assert codes == ["profile-directory"] and not world.engine.called


async def test_the_layout_has_a_row_per_rank() -> None:
    world = World(admin_key="secret")
    rows = (await ask(world, "GET", "/layout")).json()
    assert [(row["rank"], row["node"], row["kv_heads"], row["allocated_bytes"]) for row in rows] == [
        (0, "here", 2, 1000),
        (1, "here", 1, 1001),
    ]
    assert [row["kv_bytes"] for row in rows] == [10 * PLAN.block_bytes(rank) for rank in range(2)]
    # The times of the ranks go on: only rank_stats resets them.
    assert world.engine.called == [RankStats(reset=False)]
