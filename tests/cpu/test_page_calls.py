"""Calls of a server that the pages show, and a server on a socket that another program has opened."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import httpx
import pytest

import weft
from tests.cpu import tiny
from tests.cpu.test_serve import ADMIN_KEY, Server
from tests.cpu.test_watched_servers import Load
from tests.pure.commands import HERE
from tests.pure.letters import TEMPLATE
from tests.pure.page_commands import COMMANDS, DOCS, LOCAL, PageCommand

# Opens the socket and becomes the server, as systemd does: the number of the process stays.
LAUNCHER = """\
import os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="weft.socket")
os.execv(sys.executable, [sys.executable, "-m", "weft", "serve", *sys.argv[2:]])
"""
# Each line once. Those of the page on monitoring have a test of their own, and embeddings need another model.
TESTED = {command.line for command in COMMANDS if command.page == "monitoring.md"}
CALLS = {
    command.line: command
    for command in COMMANDS
    if command.is_call and command.line not in TESTED and command.page != "embeddings.md"
}


class SocketServer(Server):
    """A server whose socket is opened by a launcher."""

    program = ("-c", LAUNCHER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def server(folder: Path, port: int) -> Iterator[Server]:
    model = str(tiny.write(folder / "tiny"))
    words = "--load-format dummy --dtype float32 --max-model-len 512 --kv-cache-memory-bytes 16M --port 1"
    named = ["--served-model-name", "demo", "--chat-template", TEMPLATE, "--profile-directory", str(folder / "traces")]
    with SocketServer(f"{port}", model, *words.split(), *named) as made:
        yield made


def test_a_server_takes_the_socket_that_it_is_given(server: Server, port: int) -> None:
    assert server.url == f"http://127.0.0.1:{port}", "--port is of no account"
    assert httpx.get(f"{server.url}/health").status_code == 200
    variables = Path(f"/proc/{server.process.pid}/environ").read_bytes()
    assert b"LISTEN_FDS=1" in variables, "the launcher has set it"
    for rank in server.family():
        assert "LISTEN_FDS" not in rank.environ(), "what the server starts takes no socket for its own"


@pytest.mark.parametrize("command", CALLS.values(), ids=[line[:100] for line in CALLS])
def test_calls(server: Server, folder: Path, command: PageCommand) -> None:
    words = [LOCAL.sub(server.url, word) for word in command.words]
    if command.name == "curl":
        answer = run(["curl", "--silent", "--show-error", "--fail-with-body", *words[1:]], folder)
        assert isinstance(json.loads(answer), dict) and "error" not in json.loads(answer)
        return
    if command.name == "top":
        words += ["--url", server.url]
    with Load(server.url, clients=1, tokens=60) if command.name == "profile" else nullcontext():
        assert run([sys.executable, "-m", *words], folder)


@pytest.mark.parametrize("page", ["watching.md", "profiling.md"])
def test_python(server: Server, folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' programs, with a small model in the place of the demo's."""
    small = partial(
        weft.LLM,
        load_format="dummy",
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=16_000_000,
        distributed_executor_backend="uni",
    )
    monkeypatch.setattr(weft, "LLM", lambda model, **settings: small(str(folder / "tiny"), **settings))
    monkeypatch.chdir(folder)
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    before = {*folder.glob("traces/*")}
    exec(compile(program, page, "exec"), {})
    if page == "profiling.md":
        (trace,) = {*folder.glob("traces/*")} - before
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def run(words: list[str], folder: Path) -> str:
    """Standard output of a command that succeeds."""
    environment = {**HERE, "WEFT_ADMIN_KEY": ADMIN_KEY, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")}
    ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
    return ran.stdout


def test_the_pages_have_calls() -> None:
    assert {"curl", "top", "profile"} <= {command.name for command in CALLS.values()}
    assert any(re.search("/api/chat", command.line) for command in CALLS.values())
