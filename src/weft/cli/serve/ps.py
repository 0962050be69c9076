"""weft ps: the servers on this machine, with the state, size, devices and time of each of their models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from weft.api.service.run_files import RunningServer, running_servers
from weft.checkpoint.hub.model_names import tagged
from weft.cli.flags.command_flags import PsArguments
from weft.cli.serve.local_models import print_table, shown_date
from weft.formatting import format_bytes
from weft.study.bench.http import HttpClient, HttpFailure, HttpRefusal, ServerAddress

PATIENCE_S = 2.0  # for a server's answer: all are on this machine, and asked at once
STAYS_S = 10 * 365 * 24 * 3600.0  # Ollama's API has no value for "never", and gives a year far from now


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a server. `bytes` and `device` are None for a model that is not awake, or unknown.

    - `state`: awake, asleep, or the reason why it is unknown.
    - `until`: when it will be sent to sleep, in seconds since 1970; None: not by itself.
    """

    name: str
    state: str
    bytes: int | None = None
    device: str | None = None
    until: int | None = None


class _Row(msgspec.Struct):
    """A model in the answer to /api/ps."""

    name: str
    size: int
    size_vram: int
    expires_at: str


class _Rows(msgspec.Struct):
    models: list[_Row]


def main(arguments: PsArguments) -> int:
    """Print the servers as a table, or as one JSON object."""
    servers = running_servers()
    models = asyncio.run(ask_all(servers))
    if arguments.json:
        rows = [
            {
                "models": server.names,
                "url": server.url,
                "pid": server.pid,
                "began": int(server.began_s),
                "states": msgspec.to_builtins(states),
            }
            for server, states in zip(servers, models, strict=True)
        ]
        print(json.dumps({"servers": rows}))
        return 0
    cells = [
        [
            model.name,
            "-" if model.bytes is None else format_bytes(model.bytes),
            model.device or "-",
            model.state,
            _until(model),
            server.url,
            str(server.pid),
            shown_date(server.began_s),
        ]
        for server, states in zip(servers, models, strict=True)
        for model in grouped(states, one_model=bool(server.checkpoints))
    ]
    head = ["MODEL", "SIZE", "DEVICE", "STATE", "UNTIL", "ADDRESS", "PROCESS", "SINCE"]
    print_table(head, cells, "no server runs; `weft serve MODEL` starts one")
    return 0


async def ask_all(servers: Sequence[RunningServer]) -> list[list[ServedModel]]:
    """The models of each server, by its names."""
    return await asyncio.gather(*map(_ask, servers))


async def _ask(server: RunningServer) -> list[ServedModel]:
    # No key is sent: the user has named no address, and the answer is for this machine's table only.
    client = HttpClient(ServerAddress(server.url, None))
    try:
        async with asyncio.timeout(PATIENCE_S):
            rows = msgspec.json.decode(await client.get("/api/ps"), type=_Rows).models
    except HttpRefusal as error:
        return _unknown(server, "needs a key" if error.status == 401 else f"answers {error.status}")
    except (HttpFailure, TimeoutError, OSError, msgspec.DecodeError):
        return _unknown(server, "no answer")
    finally:
        client.close()
    return served_models(server.names, rows)


def _unknown(server: RunningServer, state: str) -> list[ServedModel]:
    return [ServedModel(name=name, state=state) for name in server.names]


def served_models(names: Sequence[str], rows: Sequence[_Row]) -> list[ServedModel]:
    """The models of these names by the rows of /api/ps, and others that it has; a model without a row is asleep."""
    awake = {row.name: row for row in rows}
    mine = {tagged(name): name for name in names}
    return [
        _awake(mine.get(name, name), awake[name]) if name in awake else ServedModel(name=mine[name], state="asleep")
        for name in dict.fromkeys([*mine, *awake])
    ]


def grouped(models: Sequence[ServedModel], *, one_model: bool) -> list[ServedModel]:
    """The models with the names of one row joined: names of one model, or of several that are not awake."""
    groups: dict[ServedModel, list[str]] = {}
    for model in models:
        alike = one_model or model.state != "awake"
        groups.setdefault(replace(model, name="" if alike else model.name), []).append(model.name)
    return [replace(model, name=", ".join(names)) for model, names in groups.items()]


def _awake(name: str, row: _Row) -> ServedModel:
    until_s = datetime.fromisoformat(row.expires_at).timestamp()
    return ServedModel(
        name=name,
        state="awake",
        bytes=row.size,
        device=device_share(row.size, row.size_vram),
        until=None if until_s > time.time() + STAYS_S else int(until_s),
    )


def device_share(nbytes: int, on_gpus: int) -> str:
    """Devices that hold a model: "GPU", "CPU", or the part of each."""
    part = round(100 * on_gpus / nbytes) if nbytes else 0
    return {0: "CPU", 100: "GPU"}.get(part, f"{part} % GPU, {100 - part} % CPU")


def _until(model: ServedModel) -> str:
    if model.state != "awake":
        return "-"
    return (
        "stays" if model.until is None else datetime.fromtimestamp(model.until, UTC).astimezone().strftime("%H:%M:%S")
    )
