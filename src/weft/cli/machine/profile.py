"""weft profile: trace steps of a server, and show what they were spent on."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.flags.command_flags import ProfileArguments
from weft.cli.parser import UsageError
from weft.cli.tables import console, figures_table
from weft.cli.top.watch import refusal_code
from weft.errors import WeftError, error_reason
from weft.monitor.trace_report import KINDS
from weft.study.bench.http import HttpClient, HttpFailure, HttpRefusal, ServerAddress

if TYPE_CHECKING:
    from rich.table import Table

POLL_S = 0.25
WRITING_S = 30.0  # seconds for the files of a trace that was ended; files of other machines never come
KERNELS = 20  # rows of the table by kernel
# Kinds of work that the planner adds up as one figure.
OVERHEAD = ("sampling", "scheduling", "other", "idle")


def main(arguments: ProfileArguments) -> int:
    """Profile a server that works, print tables or JSON, and write the merged trace."""
    output = Path(arguments.output)
    if output.parent != Path() and not output.parent.is_dir():
        raise UsageError(f"there is no directory {output.parent} for --output", code="invalid-flag-value")
    profile, trace = asyncio.run(profile_server(arguments.url, arguments.steps, arguments.timeout))
    try:
        output.write_bytes(trace)
    except OSError as error:
        raise WeftError(f"cannot write {output}: {error_reason(error)}", code="cannot-write-trace") from None
    if arguments.json:
        print(json.dumps(profile))
        return 0
    out = console()
    for part in profile_tables(profile):
        out.print(part)
    for file in profile["missing"]:
        out.print(f"not on the server's machine: {file}")
    out.print(f"{output} has all ranks on one time axis; chrome://tracing and ui.perfetto.dev open it")
    return 0


async def profile_server(url: str, steps: int, timeout_s: float) -> tuple[dict[str, Any], bytes]:
    """The report of `steps` steps, and the merged trace. Raises WeftError if the server refuses, or takes no step."""
    key = os.environ.get("WEFT_ADMIN_KEY")
    client = HttpClient(ServerAddress(url, {"Authorization": f"Bearer {key}"} if key else None))
    try:
        began = json.loads(await ask(client, "POST", f"/start_profile?steps={steps}"))
        try:
            profile = await until_written(client, timeout_s)
        except BaseException:
            await ask(client, "POST", "/stop_profile")
            raise
        if profile["report"] is None or not profile["report"]["ranks"]:
            raise WeftError(
                f"{url} took no step within {timeout_s:g} s: send it requests during the trace (traces: "
                f"{', '.join(began['files'])})",
                code="nothing-to-profile",
            )
        return profile, await ask(client, "GET", "/profile_trace")
    finally:
        client.close()


async def until_written(client: HttpClient, timeout_s: float) -> dict[str, Any]:
    """The profile once all traces are complete; after `timeout_s` the trace is ended, and has what there was."""
    if profile := await _complete(client, timeout_s):
        return profile
    await ask(client, "POST", "/stop_profile")
    if profile := await _complete(client, min(timeout_s, WRITING_S)):
        return profile
    stopped: dict[str, Any] = json.loads(await ask(client, "GET", "/profile?partial=1"))
    return stopped


async def _complete(client: HttpClient, timeout_s: float) -> dict[str, Any] | None:
    """The profile once all traces are complete; None if they are not within `timeout_s`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        await asyncio.sleep(POLL_S)
        profile: dict[str, Any] = json.loads(await ask(client, "GET", "/profile"))
        if not profile["missing"]:
            return profile
    return None


async def ask(client: HttpClient, method: str, path: str) -> bytes:
    """Body of an answer. Raises WeftError with the server's reason."""
    pieces: list[bytes] = []
    try:
        if method == "GET":
            return await client.get(path)
        await client.post(path, b"", lambda data, _: pieces.append(data))
    except HttpRefusal as error:
        hints = {
            "invalid_admin_key": "set WEFT_ADMIN_KEY to the server's admin key",
            "admin_key_unset": "start the server with WEFT_ADMIN_KEY in its environment, and set it here",
        }
        code = refusal_code(error)
        hint = hints.get(code, f"HTTP {error.status} {code}")
        raise WeftError(f"{client.server.url}{path.partition('?')[0]}: {hint}", code="profile-refused") from None
    except HttpFailure as error:
        raise WeftError(str(error), code="profile-failed") from None
    return b"".join(pieces)


def profile_tables(profile: dict[str, Any]) -> Iterator[Table]:
    """The tables by kernel, by layer and by kind of work."""
    report = profile["report"]
    yield kernel_table(report["kernels"])
    if report["layers"]:
        yield layer_table(report["layers"])
    yield share_table(report["ranks"], profile["predicted"])


def kernel_table(rows: list[dict[str, Any]]) -> Table:
    """Kernels with the most device time, as key_averages().table sorts them."""
    table = figures_table("kernel", "calls", "time", "each", "share")
    for row in rows[:KERNELS]:
        each = row["seconds"] / max(1, row["calls"])
        table.add_row(row["name"], str(row["calls"]), _ms(row["seconds"]), _ms(each), f"{row['share']:.1%}")
    return table


def layer_table(layers: dict[str, dict[str, float]]) -> Table:
    """Time of each layer over all traced steps and ranks, by phase."""
    phases = list(dict.fromkeys(phase for layer in layers.values() for phase in layer))
    table = figures_table("layer", *phases, "together")
    for number, layer in sorted(layers.items(), key=lambda item: int(item[0])):
        table.add_row(number, *(_ms(layer.get(phase, 0.0)) for phase in phases), _ms(sum(layer.values())))
    return table


def share_table(ranks: list[dict[str, Any]], predicted: dict[str, float] | None) -> Table:
    """Shares of the traced time of each rank, with the shares that the planner predicts for a step."""
    table = figures_table("share of the time", *(f"rank {row['rank']}" for row in ranks), "planner")
    for kind in KINDS:
        table.add_row(kind, *_percentages(row["shares"][kind] for row in ranks), _expected_share(kind, predicted))
    if predicted is not None:
        table.add_row(", ".join(OVERHEAD), *_percentages(map(_overhead_share, ranks)), f"{predicted['overhead']:.0%}")
    if all(row["waiting_s"] is not None for row in ranks):
        table.add_row("waiting for other ranks", *_percentages(map(_waiting_share, ranks)), "")
    return table


def _expected_share(kind: str, predicted: dict[str, float] | None) -> str:
    return "" if predicted is None or kind not in predicted else f"{predicted[kind]:.0%}"


def _percentages(shares: Iterable[float]) -> list[str]:
    return [f"{share:.1%}" for share in shares]


def _overhead_share(row: dict[str, Any]) -> float:
    return sum(float(row["shares"][kind]) for kind in OVERHEAD)


def _waiting_share(row: dict[str, Any]) -> float:
    return float(row["waiting_s"] / row["seconds"]) if row["seconds"] else 0.0


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f} ms"
