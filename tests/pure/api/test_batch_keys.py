"""Batches of clients with keys: whose limits, models and owners their lines have, also after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.pure.api.test_batches import URL, begin, client, ended, jsonl, line, rows_of
from tests.pure.worlds import FakeEngine, World, endless, saying
from weft.api.batches.store import Store
from weft.api.batches.types import BatchObject
from weft.engine.core.request import Output, Request
from weft.http.keys import digest_key

OTHERS = "{name: b, key: two}, {name: ops, key: three, admin: true}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0.005)


def world(folder: Path, limits: str, engine: FakeEngine | None = None, **options: Any) -> World:
    """A server with the key "one" of these limits, beside OTHERS; "" for OTHERS alone."""
    path = folder / "keys.yaml"
    first = f"{{name: a, key: one{limits}}}, " if limits else ""
    path.write_text(f"[{first}{OTHERS}]")
    path.chmod(0o600)
    return World(engine, api_key_file=str(path), storage_directory=str(folder), **options)


async def settled(of: World, least: int = 0) -> int:
    """Number of the engine's requests: at least `least`, and no further one for many times the pause of a line."""
    count = -1
    while count != len(of.engine.requests) or count < least:
        count = len(of.engine.requests)
        await asyncio.sleep(0.1)
    return count


async def test_only_an_administrator_names_owners(tmp_path: Path) -> None:
    """A batch under an invented owner would otherwise be nobody's, with no limits and all models."""
    of = world(tmp_path, ", models: [tiny], rpm: 30", served_model_name=("tiny", "other"))
    for key, heeded in (("one", None), ("three", "heeded")):
        headers = {"Authorization": f"Bearer {key}", "X-Weft-Owner": "x"}
        answer = await of.client.get("/v1/files", headers=headers)
        assert (answer.status_code, answer.headers.get("x-weft-owner")) == (200, heeded)
    async with client(of, "one") as api:
        disguised = api.with_options(default_headers={"X-Weft-Owner": "x"})
        batch = await ended(api, await begin(disguised, [line("a"), line("b", model="other")]))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (failed,) = await rows_of(api, batch.error_file_id)
        assert failed["response"]["status_code"] == 404
    assert [request.owner for request in of.engine.requests] == [1]


async def test_an_owner_of_an_administrator_has_the_administrator_s_share(tmp_path: Path) -> None:
    of = world(tmp_path, ", rpm: 1")
    async with client(of, "three") as api:
        named = api.with_options(default_headers={"X-Weft-Owner": "x"})
        batch = await ended(named, await begin(named, [line("a"), line("b")]))
        assert batch.request_counts.completed == 2
    assert {request.owner for request in of.engine.requests} == {3}


async def test_a_batch_of_a_key_that_was_revoked_is_not_answered(tmp_path: Path) -> None:
    first = world(tmp_path, ", rpm: 30", FakeEngine(endless))
    async with client(first, "one") as api:
        id = await begin(api, [line("a")])
        await ended(api, id, "in_progress")
    without = world(tmp_path, "")
    async with client(without, "two") as api:
        own = await ended(api, await begin(api, [line("b")]))
        assert own.status == "completed" and await settled(without, 1) == 1
    store = Store(tmp_path)
    assert store.status(id) == "in_progress", "another server may share the store, and know the key"
    store.close()
    again = world(tmp_path, ", rpm: 30")
    async with client(again, "one") as api:
        assert (await ended(api, id)).request_counts.completed == 1
    assert [request.owner for request in again.engine.requests] == [1]


@pytest.mark.parametrize(("key", "completed"), [("one", 1), ("gone", 0)])
async def test_a_batch_that_an_earlier_version_kept_has_the_limits_of_its_owner_s_key(
    tmp_path: Path, key: str, completed: int
) -> None:
    of = world(tmp_path, ", concurrent: 1")
    owner = digest_key(key).hex()[:32]
    store = Store(tmp_path)
    with store.new_content() as content:
        content.write(jsonl([line("a")]))
        file = store.add_file(owner, content, "f", "batch")
    fields: dict[str, Any] = {"completion_window": "1h", "created_at": 0, "expires_at": 2**40}
    assert store.add_batch(owner, BatchObject(id="batch_1", endpoint=URL, input_file_id=file.id, **fields))
    store._rows.execute("DELETE FROM batch_keys")
    store._rows.commit()
    async with client(of, "two"):
        assert await settled(of, completed) == completed
    assert (store.status("batch_1") == "completed") == bool(completed)
    store.close()


async def test_lines_count_as_requests(tmp_path: Path) -> None:
    of = world(tmp_path, ", rpm: 4")  # of which the upload and the batch are two
    async with client(of, "one") as api:
        id = await begin(api, [line(f"{number}") for number in range(9)])
        assert await settled(of, 2) == 2
        other = api.with_options(api_key="two")
        assert (await ended(other, await begin(other, [line("b")]))).status == "completed"
        batch = await api.batches.retrieve(id)
        assert (batch.status, batch.request_counts.completed) == ("in_progress", 2)


async def test_lines_run_as_many_at_once_as_the_key_may(tmp_path: Path) -> None:
    most = 0

    def script(request: Request) -> Iterable[Output]:
        nonlocal most
        most = max(most, len(of.engine.open))
        return saying("hello")(request)

    of = world(tmp_path, ", concurrent: 2", FakeEngine(script))
    async with client(of, "one") as api:
        batch = await ended(api, await begin(api, [line(f"{number}") for number in range(20)]))
        assert (batch.request_counts.completed, batch.request_counts.failed, most) == (20, 0, 2)


async def test_a_line_that_waits_for_tokens_is_read_once_more_when_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each try: the prompts of a large batch would be tokenised all the time, for days."""
    of = world(tmp_path, ", tpm: 40")
    rendered = 0
    render = of.service.frontend.render_chat

    def counted(*given: Any, **how: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return render(*given, **how)

    monkeypatch.setattr(of.service.frontend, "render_chat", counted)
    async with client(of, "one") as api:
        id = await begin(api, [line("abcdefgh"), *(line(f"line {number}") for number in range(8))])
        asked = await settled(of, 1)
        assert 0 < asked < 9 and rendered <= asked + of.app.state.batches.places.most
        assert (await api.batches.retrieve(id)).request_counts.failed == 0


async def test_a_batch_that_waits_for_its_rate_holds_up_no_other_key(tmp_path: Path) -> None:
    of = world(tmp_path, ", tpm: 30", max_model_len=64)
    async with client(of, "one") as api:
        slow = await begin(api, [line(f"{number}") for number in range(200)])
        await ended(api, slow, "in_progress")
        other = api.with_options(api_key="two")
        batch = await ended(other, await begin(other, [line(f"{number}") for number in range(30)]))
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert (await api.batches.retrieve(slow)).status == "in_progress"
