"""The front of several models: names, refusals and administration, over one fake server for all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.pure.servers import Exchange, serving
from tests.pure.worlds import refused
from weft.config import EngineConfig
from weft.fleet.hosting.app import create_app
from weft.fleet.hosting.catalogue import Catalogue, SetFleet
from weft.fleet.hosting.front import SetProxy
from weft.fleet.hosting.keeper import Keeper
from weft.fleet.hosting.model_set import ModelEntry, ModelSet
from weft.fleet.hosting.residency import Need, Residency, State
from weft.fleet.hosting.set_plan import ModelPlan, SetPlan
from weft.fleet.upstreams.config import UpstreamConfig
from weft.fleet.upstreams.policy import POLICIES
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.http.errors import WHOLE, HttpError
from weft.http.options import ServeOptions
from weft.machine.hardware.cluster import parse_gpus

ENTRIES = (
    ModelEntry(names=("one", "uno"), config=EngineConfig(model="Qwen/Qwen3-8B")),
    ModelEntry(names=("two",), config=EngineConfig(model="Qwen/Qwen3-4B"), keep_alive_s=60.0, always=False),
)


async def answer(exchange: Exchange) -> None:
    """Say who was asked, and how."""
    named = (exchange.json or {}).get("model", "")
    told = {name: exchange.headers.get(name) for name in ("x-weft-client", "x-request-id")}
    body = json.dumps({"model": named, "path": exchange.path, **told}).encode()
    exchange.head("200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
    exchange.writer.write(body)


class Front:
    """The front in this event loop."""

    def __init__(self, url: str, **options: Any) -> None:
        class FakeMember:
            is_suspended = False

            def __init__(self, name: str, names: Sequence[str]) -> None:
                self.replica = UpstreamReplica(UpstreamConfig(url=f"{url}/{name}", models=list(names)))
                self.replica.draining, self.is_running, self.pid, self.commands = True, False, 7, list[str]()
                self.end = asyncio.Event()

            def terminate(self) -> None:
                pass

            async def start(self, model: str, arguments: Sequence[str]) -> None:
                self.is_running, self.end = True, asyncio.Event()

            async def post_admin(self, path: str) -> None:
                self.commands.append(path)

            async def wait_ended(self) -> None:
                await self.end.wait()

            async def stop(self) -> None:
                self.is_running = False
                self.end.set()

            close = stop

            def exit_error(self) -> HttpError:
                return HttpError(503, "no cause", code="model-down")

        fleet = SetFleet([], POLICIES["least_conn"](), asyncio.get_running_loop().time)
        self.keeper = Keeper(Residency({"cpu": 100}), fleet, FakeMember)  # type: ignore[arg-type]
        models = ModelSet(entries=ENTRIES, source="set.yaml")
        catalogue = fleet.catalogue = Catalogue(models, self.keeper, parse_gpus("1xH100"))
        need = Need({"cpu": 10}, {"cpu": 1})
        plans = [
            ModelPlan(entry=entry, devices=("cpu",), need=need, weight_bytes=9, kv_bytes=1, wake_s=0.1)
            for entry in ENTRIES
        ]
        catalogue.take_plan(SetPlan(models=tuple(plans), rooms={"cpu": 100}))
        self.proxy = SetProxy(fleet, ServeOptions(**options), catalogue, self.keeper)
        transport = httpx.ASGITransport(in_two_messages(create_app(self.proxy)), client=("127.0.0.1", 9))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

    def state(self, name: str) -> State:
        return self.keeper.residency.tenants[name].state

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)


def in_two_messages(app: ASGIApp) -> ASGIApp:
    """The application for a server that does not know of whole responses in one message."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_apart(message: Message) -> None:
            whole = message.pop(WHOLE, None)
            await send(message)
            if whole is not None:
                await send({"type": "http.response.body", "body": whole})

        await app(scope, receive, send_apart)

    return respond


@asynccontextmanager
async def fronting(**options: Any) -> AsyncIterator[Front]:
    async with serving(answer) as address:
        front = Front(str(address.url), **options)
        try:
            yield front
        finally:
            await front.client.aclose()
            front.proxy.close()
            await front.keeper.close()


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        ("/v1/chat/completions", {"model": "uno", "messages": []}, "uno"),
        ("/v1/completions", {"model": "two", "prompt": "a"}, "two"),
        ("/v1/messages", {"model": "one", "messages": []}, "one"),
        ("/api/chat", {"model": "uno:latest", "messages": [{}]}, "uno"),
        ("/api/embed", {"name": "two", "input": "a"}, "two"),
        ("/tokenize", {"model": "two", "prompt": "a"}, "two"),
    ],
)
async def test_a_request_goes_to_the_model_that_it_names(path: str, body: dict[str, Any], sent: str) -> None:
    async with fronting() as front:
        told = (await front.post(path, body)).json()
        own = "one" if sent == "uno" else sent
        assert told["path"] == f"/{own}{path}"
        assert told["model"] in (sent, body.get("model", ""), "")
        assert front.state(own) is State.AWAKE
        assert {name for name in ("one", "two") if front.state(name) is State.AWAKE} == {own}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"prompt": "a"}, 400, "model_missing"),
        ("/v1/completions", {"model": "six", "prompt": "a"}, 404, "model_not_found"),
        ("/v1/batches", {"model": "one"}, 501, "not_supported"),
    ],
)
async def test_refusals(path: str, body: dict[str, Any], status: int, code: str) -> None:
    async with fronting() as front:
        refused(await front.post(path, body), status, code=code)
        assert front.state("one") is State.UNLOADED, "nobody is loaded for a wrong request"


async def test_unknown_paths_and_keep_alive() -> None:
    async with fronting() as front:
        refused(await front.client.get("/nowhere"), 404, code="unknown_url")
        soon = await front.post("/api/chat", {"model": "two", "messages": [], "keep_alive": "soon"})
        assert (soon.status_code, "'soon'" in soon.json()["error"]) == (400, True)
        assert (await front.post("/api/pull", {"model": "two"})).status_code == 501
        unload = await front.post("/api/generate", {"model": "two", "keep_alive": 0})
        assert unload.json()["done_reason"] == "unload"
        assert front.state("two") is State.UNLOADED


@pytest.mark.parametrize(("padding", "limit", "status"), [(900, None, 200), (2000, 1000, 413), (2**21, None, 413)])
async def test_a_body_that_the_front_reads_is_bounded(padding: int, limit: int | None, status: int) -> None:
    """By --max-body-bytes, and by what the event loop may decode at once."""
    async with fronting(max_body_bytes=limit) as front:
        answer = await front.post("/api/show", {"model": "one", "system": "x" * padding})
        assert answer.status_code == status


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff", b"[]", b'{"model": 1}', b"{}", b""])
async def test_a_body_that_names_no_model(body: bytes) -> None:
    async with fronting() as front:
        answer = await front.client.post("/api/show", content=body)
        assert answer.status_code == 400 and set(answer.json()) == {"error"}


async def test_lists() -> None:
    async with fronting() as front:
        assert [row["id"] for row in (await front.client.get("/v1/models")).json()["data"]] == ["one", "uno", "two"]
        assert (await front.client.get("/v1/models/two")).json()["root"] == "Qwen/Qwen3-4B"
        assert (await front.client.get("/api/ps")).json()["models"] == []
        await front.post("/v1/completions", {"model": "two", "prompt": "a"})
        (row,) = (await front.client.get("/api/ps")).json()["models"]
        assert (row["name"], row["size"], row["size_vram"]) == ("two:latest", 10, 0)
        shown = (await front.post("/api/show", {"model": "one"})).json()
        assert shown["model_info"]["general.architecture"] == "qwen3"


async def test_health() -> None:
    async with fronting() as front:
        assert (await front.client.get("/health/live")).status_code == 200
        refused(await front.client.get("/health/ready"), 503, code="model_not_ready")
        await front.keeper.start(["one"])
        assert (await front.client.get("/health/ready")).status_code == 200
        assert (await front.client.get("/health")).status_code == 200
        front.keeper.models["one"].failures, front.keeper.models["one"].fault = 5, HttpError(503, "a cause", code="x")
        down = refused(await front.client.get("/health"), 503, code="model_down")
        assert "a cause" in str(down)
        refused(await front.client.get("/health/ready"), 503, code="model_not_ready")
        assert "one" not in {row["id"] for row in (await front.client.get("/v1/models")).json()["data"]}


async def test_administration_from_this_machine() -> None:
    async with fronting() as front:
        for change, state in (("load", "awake"), ("sleep", "asleep"), ("wake", "awake"), ("unload", "unloaded")):
            row = (await front.post(f"/admin/models/{change}", {"model": "two"})).json()
            assert row["state"] == state
        assert front.keeper.models["two"].member.commands == ["/sleep?level=1", "/wake_up"]  # type: ignore[attr-defined]
        refused(await front.post("/admin/models/load", {}), 400, code="model_missing")
        refused(await front.post("/admin/models/paint", {"model": "two"}), 404, code="unknown_url")
        refused(await front.client.post("/sleep"), 400, code="model_missing")
        refused(await front.client.post("/sleep?model=two&level=2"), 400, code="sleep_level")
        assert (await front.client.get("/is_sleeping?model=two")).json() == {"is_sleeping": True}
        refused(await front.client.get("/layout?model=two"), 409, code="model_not_loaded")
        for strange in ({"X-Forwarded-For": "10.0.0.9"}, {"Origin": "http://page.example"}, {"Host": "page.example"}):
            refused(await front.client.get("/admin/models", headers=strange), 403, code="admin_key_unset")
            refused(await front.client.post("/sleep?model=two", headers=strange), 403, code="admin_key_unset")
        own_page = {"Origin": "http://127.0.0.1:8000"}
        assert (await front.client.get("/admin/models", headers=own_page)).status_code == 200


async def test_without_an_admin_key_nobody_administrates_where_clients_have_keys() -> None:
    """A proxy on this machine that adds no header would let its clients do so."""
    async with fronting(api_key=("client",)) as front:
        for headers in ({}, {"Authorization": "Bearer client"}):
            for path in ("/sleep?model=two", "/wake_up?model=two", "/admin/models/unload"):
                refused(await front.post(path, {"model": "two"}, **headers), 403, code="admin_key_unset")
        assert front.state("two") is State.UNLOADED


async def test_models_servers_learn_whose_request_it_is(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one, weight: 3}, {name: 'b\u00e9', key: two}]")
    keys.chmod(0o600)
    body = {"model": "two", "prompt": "a"}
    async with fronting(api_key_file=str(keys)) as front:
        told = []
        for key in ("one", "two"):
            forged = {"Authorization": f"Bearer {key}", "X-Weft-Client": '{"name": "c"}'}
            answered = (await front.post("/v1/completions", body, **forged)).json()
            told.append(json.loads(answered["x-weft-client"]))
        first, second = told
        assert (first["name"], first["weight"], second["name"], second["weight"]) == ("a", 3.0, "b\u00e9", 1.0)
        assert first["number"] != second["number"]
        assert first["salt"] != second["salt"] != ""
    async with fronting() as front:
        answered = (await front.post("/v1/completions", body, **{"X-Weft-Client": "{}"})).json()
        assert answered["x-weft-client"] is None


async def test_request_ids() -> None:
    body = {"model": "two", "prompt": "a"}
    async with fronting(enable_request_id_headers=True) as front:
        answered = await front.post("/v1/completions", body, **{"X-Request-Id": "mine"})
        assert (answered.headers["x-request-id"], answered.json()["x-request-id"]) == ("mine", "mine")
        answered = await front.post("/v1/completions", body)
        assert answered.headers["x-request-id"] == answered.json()["x-request-id"]
        assert (await front.client.get("/v1/models")).headers["x-request-id"]


async def test_listings_from_this_machine_may_be_open() -> None:
    async with fronting(api_key=("client",), open_listing=True) as front:
        for path in ("/v1/models", "/v1/models/one", "/api/tags", "/api/ps"):
            assert (await front.client.get(path)).status_code == 200
            assert (await front.client.get(path, headers={"X-Forwarded-For": "10.0.0.9"})).status_code == 401
        refused(await front.post("/v1/completions", {"model": "two", "prompt": "a"}), 401, code="invalid_api_key")


async def test_a_key_sees_its_models_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one, models: [uno]}]")
    keys.chmod(0o600)
    async with fronting(api_key_file=str(keys)) as front:
        for name, status in (("uno", 200), ("uno:latest", 200), ("two", 404), ("one", 404), ("six", 404)):
            shown = await front.post("/api/show", {"model": name}, Authorization="Bearer one")
            assert shown.status_code == status, name


async def test_a_request_waits_no_longer_for_its_model_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronting(request_timeout=0.01) as front:
        monkeypatch.setattr(front.keeper.models["two"].member, "start", lambda *_: asyncio.Event().wait())
        late = await front.post("/v1/completions", {"model": "two", "prompt": "a"})
        assert "0.01 s" in str(refused(late, 503, code="model_not_ready"))


async def test_keys() -> None:
    async with fronting(api_key=("client",), admin_key="owner") as front:
        body = {"model": "two", "prompt": "a"}
        refused(await front.post("/v1/completions", body), 401, code="invalid_api_key")
        refused(await front.client.get("/v1/models"), 401, code="invalid_api_key")
        assert (await front.post("/v1/completions", body, Authorization="Bearer client")).status_code == 200
        for key in ({}, {"Authorization": "Bearer client"}):
            refused(await front.client.get("/admin/models", headers=key), 401, code="invalid_admin_key")
        rows = await front.client.get("/admin/models", headers={"Authorization": "Bearer owner"})
        assert [row["state"] for row in rows.json()["models"]] == ["unloaded", "awake"]
        asks = await front.post("/api/generate", {"model": "two", "keep_alive": 0}, Authorization="Bearer client")
        assert asks.status_code == 403, "one client must not send the model of all to sleep"
