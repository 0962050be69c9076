"""A real set of two tiny models behind one address; the commands of docs/several-models.md."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cpu import tiny
from tests.cpu.families import command_line
from tests.cpu.test_serve import ADMIN_KEY, HI, PATIENCE_S, Server, eventually

OWNER = {"Authorization": f"Bearer {ADMIN_KEY}"}
# A process per model and its ranks: the first start of each is all that these tests take long for.
COMMON = {
    "port": 0,
    "load-format": "dummy",
    "dtype": "float32",
    "max-model-len": 512,
    "kv-cache-memory-bytes": "16M",
}


@pytest.fixture(scope="module")
def set_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    rows = [
        {"name": ["one", "uno"], "model": str(tiny.write(folder / "one"))},
        {
            "name": "two",
            "model": str(tiny.write(folder / "two")),
            "keep-alive": "1h",
            "load": "demand",
            "distributed-executor-backend": "inline",  # it is started several times
        },
    ]
    path = folder / "set.yaml"
    path.write_text(json.dumps({**COMMON, "models": rows}))
    return path


@pytest.fixture(scope="module")
def several(set_file: Path) -> Iterator[Server]:
    with Server("--config", str(set_file)) as server:
        yield server


def ask(server: Server, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": HI, "max_tokens": 4, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def states(server: Server) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{server.url}/admin/models", headers=OWNER).json()
    return {row["names"][0]: row for row in found["models"]}


def load(server: Server, model: str) -> dict[str, Any]:
    """Load a model, if it is not, and return its state. The tests may run in any order, and in several processes."""
    assert change(server, "load", model).json()["state"] == "awake"
    return states(server)[model]


def change(server: Server, what: str, model: str) -> httpx.Response:
    url = f"{server.url}/admin/models/{what}"
    return httpx.post(url, json={"model": model}, headers=OWNER, timeout=PATIENCE_S)


class Asking:
    """Clients of both models while the block runs; `statuses` are of the answers."""

    def __init__(self, server: Server, *models: str) -> None:
        self.statuses: dict[str, list[int]] = {model: [] for model in models}
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(model,)) for model in models for _ in range(2)]

    def _ask(self, model: str) -> None:
        while not self._stop.wait(0.02):
            self.statuses[model].append(ask(self._server, model).status_code)

    def some_more(self, model: str) -> None:
        """Wait for some more answers."""
        enough = len(self.statuses[model]) + 3
        eventually(lambda: len(self.statuses[model]) >= enough)

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def test_all_models_are_listed_before_they_are_loaded(several: Server) -> None:
    rows = httpx.get(f"{several.url}/v1/models").json()["data"]
    assert [row["id"] for row in rows] == ["one", "uno", "two"]
    tags = httpx.get(f"{several.url}/api/tags").json()["models"]
    assert [row["name"] for row in tags] == ["one:latest", "uno:latest", "two:latest"]
    awake = httpx.get(f"{several.url}/api/ps").json()["models"]
    assert {row["name"] for row in awake} == {"one:latest", "uno:latest"}
    assert states(several)["two"]["state"] == "unloaded"
    assert httpx.post(f"{several.url}/api/show", json={"model": "two"}).json()["details"]["family"] == "llama"


def test_both_answer_by_name_and_take_the_bytes_of_the_plan(several: Server) -> None:
    load(several, "two")
    assert ask(several, "uno").json()["model"] == "uno"
    assert ask(several, "two").json()["model"] == "two"
    body = {"model": "two:latest", "messages": HI, "stream": False, "options": {"num_predict": 4}}
    assert httpx.post(f"{several.url}/api/chat", json=body).json()["done_reason"] == "length"
    assert ask(several, "three").status_code == 404
    assert httpx.post(f"{several.url}/v1/completions", json={"prompt": "a"}).status_code == 400
    for name, row in states(several).items():
        ranks = httpx.get(f"{several.url}/layout", params={"model": name}, headers=OWNER).json()
        assert sum(rank["weight_bytes"] for rank in ranks) == row["weight_bytes"]
        assert sum(rank["kv_bytes"] for rank in ranks) == pytest.approx(row["kv_bytes"], rel=0.01)


def test_wake_ups_under_load_fail_no_request(several: Server) -> None:
    load(several, "two")
    with Asking(several, "one", "two") as asking:
        for _ in range(3):
            assert change(several, "sleep", "two").status_code == 200
            asking.some_more("two")
            asking.some_more("one")
    assert {status for statuses in asking.statuses.values() for status in statuses} == {200}
    assert states(several)["two"]["wake_s"] is not None


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_model_does_not_touch_the_other(several: Server, blow: signal.Signals) -> None:
    load(several, "two")
    before = states(several)
    with Asking(several, "one") as asking:
        asking.some_more("one")
        os.kill(before["two"]["pid"], blow)
        assert ask(several, "two").status_code in (200, 502, 503)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: ask(several, "two"), range(4)))
        eventually(lambda: ask(several, "two").status_code == 200)
        asking.some_more("one")
    assert set(asking.statuses["one"]) == {200}
    after = states(several)
    assert after["one"]["pid"] == before["one"]["pid"]
    assert after["two"]["pid"] != before["two"]["pid"]
    assert after["two"]["failures"] == 0, "it has answered since"


def test_an_engine_that_crashes_is_started_again_by_its_own_process(several: Server) -> None:
    before = load(several, "one")
    family = psutil.Process(before["pid"]).children(recursive=True)
    crashed = next(member for member in family if "weft.engine.replicas.process" in command_line(member))
    crashed.send_signal(signal.SIGSEGV)
    eventually(lambda: not crashed.is_running())
    eventually(lambda: ask(several, "one").status_code == 200)
    after = states(several)["one"]
    assert (after["pid"], after["failures"]) == (before["pid"], 0)


def test_keep_alive_of_ollama(several: Server) -> None:
    url = f"{several.url}/api/generate"
    first = httpx.post(url, json={"model": "two", "keep_alive": "10m"}, timeout=PATIENCE_S).json()
    assert first["done_reason"] == "load"
    assert 590 < states(several)["two"]["expires_in_s"] <= 600
    assert httpx.post(url, json={"model": "two", "keep_alive": 0}).json()["done_reason"] == "unload"
    eventually(lambda: states(several)["two"]["state"] == "asleep")
    assert httpx.post(url, json={"model": "two", "keep_alive": 0}).json()["done_reason"] == "unload"
    assert states(several)["two"]["state"] == "asleep", "nobody wakes it to send it to sleep"
    assert "two:latest" not in {row["name"] for row in httpx.get(f"{several.url}/api/ps").json()["models"]}
    assert httpx.post(url, json={"model": "two", "keep_alive": "soon"}).status_code == 400


def test_only_the_administrator_changes_models(several: Server) -> None:
    for method, path in (("GET", "/admin/models"), ("POST", "/admin/models/unload"), ("POST", "/sleep?model=one")):
        assert httpx.request(method, f"{several.url}{path}", json={"model": "one"}).status_code == 401
    assert httpx.post(f"{several.url}/start_profile", json={"model": "one"}).status_code in (401, 403)
    assert change(several, "sleep", "nobody").status_code == 404
    assert change(several, "paint", "one").status_code == 404


def test_unloading_ends_the_process(several: Server) -> None:
    pid = load(several, "two")["pid"]
    assert change(several, "unload", "two").json()["state"] == "unloaded"
    assert not psutil.pid_exists(pid)
    assert ask(several, "one").status_code == 200


def test_everything_ends_with_the_front(set_file: Path) -> None:
    with Server("--config", str(set_file)) as server:  # others go on with theirs
        family = server.family()
        assert family
        server.process.kill()
        gone, alive = psutil.wait_procs(family, timeout=5.0)
        assert not alive
        assert gone


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """The set file of docs/several-models.md is one."""
    from weft.cli.serve.set_file import read_model_set

    page = (Path(__file__).parents[2] / "docs/several-models.md").read_text()
    text = page.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "models.yaml").write_text(text)
    models = read_model_set(str(tmp_path / "models.yaml"))
    assert models is not None
    assert len(models.entries) > 1


@pytest.mark.long
def test_the_end_does_not_wait_for_a_stopped_rank(tmp_path: Path) -> None:
    rows = [{"name": "one", "model": str(tiny.write(tmp_path / "one")), "distributed-executor-backend": "mp"}]
    path = tmp_path / "set.yaml"
    path.write_text(json.dumps({**COMMON, "models": rows}))
    with Server("--config", str(path)) as server:
        asking = threading.Thread(target=ask, args=(server, "one"), kwargs={"n": 64, "max_tokens": 500})
        rank = next(process for process in server.family() if "weft.worker" in command_line(process))
        rank.suspend()
        asking.start()
        eventually(lambda: states(server)["one"]["running"] == 1)
        family = server.family()
        server.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([*family, psutil.Process(server.process.pid)], timeout=20.0)
        assert not alive, "it does not wait for --shutdown-timeout, 30 s"
        asking.join(PATIENCE_S)
