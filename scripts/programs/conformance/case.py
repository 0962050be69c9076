"""Case: one behaviour that clients rely on; Api: the server that is asked for it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema

PATIENCE_S = 120.0  # for one answer


class Failed(Exception):
    """The server behaves differently; the message says how."""


@dataclass(frozen=True)
class Case:
    """A behaviour by its name, `api: what`."""

    name: str
    run: Callable[[Api], Awaitable[None]]


@dataclass(frozen=True)
class Answer:
    """Status, type and text of an answer. `frames`: the data of its events, or its lines, as far as they are JSON."""

    status: int
    kind: str
    text: str

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError:
            raise Failed(f"status {self.status} without JSON: {self.text[:200]!r}") from None

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Name and data of each event; comments left out."""
        check(self.kind.startswith("text/event-stream"), f"a stream has the type {self.kind!r}: {self.text[:200]!r}")
        found = []
        for block in self.text.replace("\r\n", "\n").split("\n\n"):
            rows = [row for row in block.split("\n") if row and not row.startswith(":")]
            if not rows:
                continue
            fields = dict(row.split(":", 1) for row in rows)
            check(set(fields) <= {"event", "data", "id"}, f"an event has the fields {sorted(fields)}")
            data = fields.get("data", "").strip()
            found.append((fields.get("event", "").strip(), data if data == "[DONE]" else _parse(data)))
        return found

    @property
    def lines(self) -> list[Any]:
        """The objects of a stream of lines."""
        check(self.kind.startswith("application/x-ndjson"), f"a stream has the type {self.kind!r}: {self.text[:200]!r}")
        return [_parse(line) for line in self.text.split("\n") if line]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Failed(f"a part of a stream is no JSON: {text[:200]!r}") from None


class Api:
    """A server and one of its models."""

    def __init__(self, base_url: str, model: str, key: str | None) -> None:
        self.model = model
        headers = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}
        self.client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=PATIENCE_S)

    async def ask(self, method: str, path: str, **how: Any) -> Answer:
        """The answer to a request, whatever it is."""
        made = await self.client.request(method, path, **how)
        return Answer(made.status_code, made.headers.get("content-type", ""), made.text)

    async def post(self, path: str, /, **fields: Any) -> Answer:
        """The answer to a body with the server's model, which must be 200."""
        made = await self.ask("POST", path, json={"model": self.model, **fields})
        check(made.status == 200, f"status {made.status}: {made.text[:300]}")
        return made

    async def refused(self, path: str, status: int, /, **fields: Any) -> Any:
        """The body of a refusal with this status."""
        made = await self.ask("POST", path, json={"model": self.model, **fields})
        check(made.status == status, f"status {made.status}, not {status}: {made.text[:300]}")
        return made.json


def check(holds: object, otherwise: str) -> None:
    """Raise Failed unless it holds."""
    if not holds:
        raise Failed(otherwise)


def equal(found: object, wanted: object, what: str) -> None:
    """Raise Failed unless two values are the same."""
    check(found == wanted, f"{what} is {found!r:.200}, not {wanted!r:.200}")


def has(value: Any, kinds: dict[str, Any], what: str) -> None:
    """Raise Failed unless an object has these fields, of these types."""
    check(isinstance(value, dict), f"{what} is no object: {value!r:.200}")
    for name, kind in kinds.items():
        check(name in value, f"{what} has no {name}: {value!r:.300}")
        check(isinstance(value[name], kind), f"{what}.{name} is {value[name]!r:.100}")


def valid(text: str, schema: dict[str, Any]) -> Any:
    """The value of a JSON text that a schema allows."""
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema)
    except (ValueError, jsonschema.ValidationError) as error:
        raise Failed(f"{text[:200]!r} is not as the schema says: {str(error).splitlines()[0]}") from None
    return value
