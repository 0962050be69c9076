"""/openapi.json describes every route, and what the routes answer is what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.pure.worlds import HI, World
from weft.api.server.app import ROUTES
from weft.api.server.openapi import OPERATIONS, methods_of


async def description(world: World | None = None) -> dict[str, Any]:
    answer = await (world or World()).client.get("/openapi.json")
    assert answer.status_code == 200
    content: dict[str, Any] = answer.json()
    return content


def test_every_route_is_described_and_nothing_else() -> None:
    served = {(method, route.path) for route in ROUTES for method in methods_of(route)}
    assert served == set(OPERATIONS)


async def test_the_description_is_whole() -> None:
    content = await description()
    assert content["openapi"].startswith("3.1")
    names: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                names.append(value["$ref"].rpartition("/")[2])
            for part in value.values():
                visit(part)
        elif isinstance(value, list):
            for part in value:
                visit(part)

    visit(content)
    assert names and set(names) == set(content["components"]["schemas"])
    operations = [operation for methods in content["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == len(OPERATIONS)
    assert all("{name:path}" not in path for path in content["paths"])
    for schema in content["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


CHAT = {"model": "tiny", "messages": HI}
ASKED = [
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/completions", {"model": "tiny", "prompt": "a"}),
    ("post", "/v1/responses", {"model": "tiny", "input": "hi"}),
    ("post", "/v1/messages", {**CHAT, "max_tokens": 5}),
    ("post", "/v1/messages/count_tokens", CHAT),
    ("get", "/v1/files", None),
    ("get", "/v1/batches", None),
    ("get", "/api/version", None),
    ("get", "/api/tags", None),
    ("get", "/api/ps", None),
    ("post", "/api/show", {"model": "tiny"}),
    ("post", "/api/chat", {**CHAT, "stream": False}),
    ("post", "/api/generate", {"model": "tiny", "prompt": "a", "stream": False}),
]


@pytest.mark.parametrize(("method", "path", "body"), ASKED, ids=[path for _, path, _ in ASKED])
async def test_answers_are_as_described(method: str, path: str, body: Any, tmp_path: Path) -> None:
    world = World(storage_directory=str(tmp_path))
    content = await description(world)
    operation = content["paths"][path][method]

    def check(schema: dict[str, Any], value: Any) -> None:
        jsonschema.validate(value, {**schema, "components": content["components"]})

    answer = await world.client.request(method, path, **({} if body is None else {"json": body}))
    assert answer.status_code == 200, answer.text
    check(operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json())
    if body is None:
        return
    check(operation["requestBody"]["content"]["application/json"]["schema"], body)
    for wrong in ({**body, "model": "other"}, {**body, "model": 5}):
        refusal = await world.client.request(method, path, json=wrong)
        described = operation["responses"][str(refusal.status_code)]["content"]["application/json"]["schema"]
        check(described, refusal.json())


async def test_streams_are_as_described() -> None:
    world = World()
    content = await description(world)
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", {"model": "tiny", "input": "hi"})):
        answer = await world.client.post(path, json={**body, "stream": True})
        part = content["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["x-part"]
        rows = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert rows
        for row in rows:
            jsonschema.validate(json.loads(row), {**part, "components": content["components"]})
