"""Attacks on what is stored: large uploads at once, many files, and disks that are full."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.programs.abuse.apis import STORED, send, upload_of
from scripts.programs.abuse.bodies import CHAT, COMPLETIONS, HI, MEGA
from scripts.programs.abuse.case import Attack, Life, Outcome
from scripts.programs.abuse.killers import HARMLESS, SMALL, url
from scripts.programs.abuse.server import KEY, Gateway, Server
from scripts.programs.abuse.target import Size, Target

UPLOAD_BYTES = 150 * MEGA  # more than all connections together may hold, less than a file may have
FILES, SAMPLE = 500, 50
SLOWER = 3  # times that the last files may take as long as the first
DISK = "256k"
REQUESTS = 30
LOG_LINES = 5  # of a gateway about a disk that is full for some seconds
NO_DISK = {"skipped: no tmpfs can be mounted": 1}


async def uploads(target: Target) -> None:
    """Two large files at once, twice; a neighbour's small one meanwhile."""
    size = UPLOAD_BYTES * target.size.endless_bytes // (64 * 2**20)
    fields, content = await asyncio.to_thread(lambda: upload_of(b"x" * size))
    for _ in range(2):
        asking = asyncio.gather(*(send(target, "/v1/files", fields, content) for _ in range(2)))
        small = await send(target, "/v1/files", *upload_of(b"{}\n"))
        target.record("a small file meanwhile", small, ("200",))
        for answer in await asking:
            target.record(f"{size:,} bytes", answer, ("200",))


async def many_files(target: Target) -> None:
    """Empty files of one client: the last ones take as long as the first."""
    began, took_s = time.monotonic(), []
    for number in range(FILES):
        target.record(f"file {number}", await send(target, "/v1/files", *upload_of(b"")), ("200",))
        took_s.append(time.monotonic() - began)
        began = time.monotonic()
    first, last = sorted(took_s[:SAMPLE])[SAMPLE // 2], sorted(took_s[-SAMPLE:])[SAMPLE // 2]
    target.check(last <= SLOWER * first, f"a file takes {last * 1000:.1f} ms, one of the first {first * 1000:.1f} ms")


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A disk of DISK bytes; None if this process may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no byte free."""
    path = disk / "full"
    with path.open("wb", buffering=0) as file:
        for block in (4096, 1):
            try:
                while True:
                    file.write(b"x" * block)
            except OSError:
                pass
    return path


def full_storage(words: tuple[str, ...]) -> Outcome:
    """Files and batches on a full disk are refused, answers are not; once there is room, files are taken again."""
    with small_disk() as disk:
        if disk is None:
            return Outcome(NO_DISK, [])
        with Server(words[0], "-tp", "1", *SMALL, "--storage-directory", str(disk / "store")) as server:
            target = Target(server, KEY, Size())
            file, form = upload_of(b"{}\n"), upload_of(b"x" * MEGA)
            first = asyncio.run(send(target, "/v1/files", *file))
            target.record("before", first, ("200",))
            asked = {"input_file_id": json.loads(first.body)["id"], "endpoint": CHAT, "completion_window": "24h"}
            full = fill(disk)
            for _ in range(3):
                for one in (file, form):
                    target.record("a file", asyncio.run(send(target, "/v1/files", *one)), ("503 storage_failed",))
                target.record("a batch", asyncio.run(target.post("/v1/batches", asked)), ("503 storage_failed",))
                target.record("a chat", asyncio.run(target.post(CHAT, HI)), ("200",))
            full.unlink()
            target.record("room again", asyncio.run(send(target, "/v1/files", *file)), ("200",))
            return ended(target, server)


def full_access_log(words: tuple[str, ...]) -> Outcome:
    """A gateway whose access log finds no room answers as before, and says so in few lines."""
    with small_disk() as disk, tempfile.TemporaryDirectory() as folder:
        if disk is None:
            return Outcome(NO_DISK, [])
        with ExitStack() as stack:
            server = stack.enter_context(Server(words[0], "-tp", "1", *SMALL))
            gateway = stack.enter_context(Gateway("--config", str(configure(Path(folder), server, disk / "log"))))
            target, stranger = Target(gateway, KEY, Size()), Target(gateway, "nobody", Size())
            full = fill(disk)
            for _ in range(REQUESTS):
                asyncio.run(ask(target, stranger))
            lines = target.log().count("\n")
            target.check(lines <= LOG_LINES, f"{lines} lines about the disk: {target.log()[-300:]}")
            full.unlink()
            asyncio.run(ask(target, stranger))
            target.statuses += stranger.statuses
            target.unexpected += stranger.unexpected
            return ended(target, gateway)


def configure(folder: Path, server: Server, log: Path) -> Path:
    """The configuration of a gateway that has keys of its own."""
    upstream = {"url": url(server), "key_file": str(folder / "upstream.key")}
    config = {"upstreams": [upstream], "keys": str(folder / "keys.yaml"), "access_log": str(log)}
    files = {"upstream.key": KEY, "keys.yaml": json.dumps([{"name": "abuse", "key": KEY}])}
    for name, text in (files | {"gateway.yaml": json.dumps(config)}).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    return folder / "gateway.yaml"


async def ask(target: Target, stranger: Target) -> None:
    """One request of each kind."""
    target.record("a good one", await target.post(COMPLETIONS, HARMLESS), ("200",))
    target.record("another model", await target.post(COMPLETIONS, HARMLESS | {"model": "nothing"}), ("404",))
    stranger.record("another key", await stranger.post(COMPLETIONS, HARMLESS), ("401",))


def ended(target: Target, server: Server) -> Outcome:
    target.check("Traceback" not in server.log(), f"a traceback: {server.log()[-500:]}")
    return Outcome(dict(target.statuses), target.unexpected, round(server.terminate(), 2))


ATTACKS = (
    Attack("storage-uploads-150MB", "storage", uploads, STORED),
    Attack("storage-many-files", "storage", many_files, STORED),
)
LIVES = (
    Life("storage-full-disk", "storage", full_storage),
    Life("storage-full-access-log", "storage", full_access_log),
)
