"""Every field of every request with values of every kind: no answer is a 5xx, and each status is a described one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pure.worlds import HI, FakeEngine, World, saying
from weft.api.server.openapi import OPERATIONS, STATUSES

CHAT: dict[str, Any] = {"model": "tiny", "messages": HI}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "a"},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"model": "tiny", "input": "a"},
    **{path: {"model": "tiny", "text_1": "a", "text_2": "b"} for path in ("/v1/score", "/score")},
    **{path: {"model": "tiny", "query": "a", "documents": ["b"]} for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    "/api/embed": {"model": "tiny", "input": "a"},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
    "/api/show": {"model": "tiny"},
    "/api/chat": CHAT,
    "/api/generate": {"model": "tiny", "prompt": "a"},
}
ON_DISK = {"/api/pull", "/api/delete"}  # these would change the machine's models
VALUES: list[Any] = [None, True, 0, -1, 10**30, 0.5, "", "x", "\u0000\ud7ff", [], ["x"], [[]], [{}], [None], {}]
VALUES += [{"type": "x"}, {"type": "function"}, {"type": "json_schema"}, [{"type": "function"}], [{"role": "user"}]]
VALUES += [[{"type": "message", "role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{}]}]]
ASKED = {path: operation for (_, path), operation in OPERATIONS.items() if operation.request and path in BODIES}


def test_every_request_with_a_body_is_tried() -> None:
    assert BODIES.keys() | ON_DISK == {path for (_, path), operation in OPERATIONS.items() if operation.request}


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_of_any_kind(path: str, tmp_path: Path) -> None:
    world = World(FakeEngine(saying("a")), storage_directory=str(tmp_path))
    fields = ASKED[path].request.__struct_fields__
    for field in fields:
        for value in VALUES:
            answer = await world.client.post(path, json={**BODIES[path], field: value})
            assert answer.status_code in (200, *STATUSES) and answer.status_code < 500, (field, value, answer.text)
    await world.app.state.batches.close()


async def test_paths_and_queries_of_any_kind(tmp_path: Path) -> None:
    world = World(storage_directory=str(tmp_path))
    for id in ("x", "..", "%2e%2e", "file-0%00", "a" * 1000, "é"):
        for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}", f"/v1/models/{id}"):
            assert (await world.client.get(path)).status_code in (200, 404), path
    for query in ("limit=0", "limit=-1", "limit=x", "limit=99999999999", "limit=%00", "after=x", "order=x", "limit=²"):
        for path in ("/v1/files", "/v1/batches"):
            assert (await world.client.get(f"{path}?{query}")).status_code in (200, 400), query
    await world.app.state.batches.close()
