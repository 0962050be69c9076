"""Every path of /openapi.json: whatever a client sends, the server is not at fault, and the status is described.

schemathesis makes the requests from the description.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.pure.servers import PATIENCE_S, weft_server
from tests.pure.worlds import World
from weft.api.server.openapi import OPERATIONS

EXAMPLES = 2  # of each path, right ones and wrong ones
LONG_EXAMPLES = 50
ADMIN_KEY = "secret"
# Others would send the server to sleep, write a profile, or go to the hub.
WITH_ADMIN_KEY = ("/layout", "/is_sleeping", "/reset_prefix_cache", "/wake_up")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a loop of its own."""
    storage = tmp_path_factory.mktemp("storage")
    began: list[str] = []
    ready, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with weft_server(World(storage_directory=str(storage), admin_key=ADMIN_KEY)) as live:
            began.append(live.url)
            ready.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(PATIENCE_S)
    yield began[0]
    ended.set()
    thread.join()


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    """The server's description."""
    schemathesis = pytest.importorskip("schemathesis")  # here: other processes of the tests do without it
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def check_operation(schema: Any, method: str, path: str, examples: int) -> None:
    """Send requests of both kinds. 501 and 503 are refusals, as long as they are described."""
    from schemathesis import GenerationMode

    operation = schema[path][method]
    described = {int(status) for status in operation.definition.raw["responses"]}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"} if path in WITH_ADMIN_KEY else {}
    seen = set()

    for mode in GenerationMode:
        kind = operation.as_strategy(generation_mode=mode)

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=kind)
        def send(case: Any) -> None:
            response = case.call(headers=headers, timeout=PATIENCE_S)
            seen.add(response.status_code)
            told = f"{method} {path}: {response.status_code}: {response.text[:300]}"
            assert response.status_code in described, told
            assert response.status_code < 500 or response.status_code in (501, 503), told

        try:
            send()
        except hypothesis.errors.Unsatisfiable:
            continue  # no wrong request can be made of a path without parameters
    assert seen


OPERATION_NAMES = [(method, path.replace(":path", "")) for method, path in OPERATIONS]


@pytest.mark.parametrize(("method", "path"), OPERATION_NAMES)
def test_statuses_are_described(schema: Any, method: str, path: str) -> None:
    check_operation(schema, method, path, EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path"), OPERATION_NAMES)
def test_statuses_of_many_requests_are_described(schema: Any, method: str, path: str) -> None:
    check_operation(schema, method, path, LONG_EXAMPLES)


async def test_parts_of_files_are_described(tmp_path: Path) -> None:
    world = World(storage_directory=str(tmp_path))
    file = (await world.client.post("/v1/files", files={"file": ("f", b"abc")}, data={"purpose": "batch"})).json()["id"]
    described = (await world.client.get("/openapi.json")).json()["paths"]["/v1/files/{id}/content"]["get"]["responses"]
    for part, status in (("bytes=0-1", 206), ("bytes=9-", 416)):
        answer = await world.client.get(f"/v1/files/{file}/content", headers={"Range": part})
        assert answer.status_code == status and str(status) in described
