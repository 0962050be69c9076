"""`scripts/conformance agents`: conversations of coding agents with Weft, directly and through its gateway.

Claude Code, Codex and opencode, installed by npm, and the official clients of OpenAI's, Anthropic's and Ollama's APIs
each have a conversation of ten calls of a shell with a model that follows a script (`scripted`), in which one call is
cut by max_tokens, and one that is longer than the model's context. Prints a line for each, and one JSON object; status
1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripts.programs.conformance.agents import clients

ROOT = Path(__file__).parents[4]
SCRIPTED = "scripts.programs.conformance.agents.scripted"
TOOLS = ROOT / ".venv" / "agents"  # where npm installs them
PACKAGES = {  # and the script that fetches the program, which npm does not run unasked
    "@anthropic-ai/claude-code@2.1.197": "install.cjs",
    "@openai/codex@0.171.0": None,
    "opencode-ai@1.18.33": "postinstall.mjs",
}
TURNS, CUT = 10, 4
TEN = "ten calls"
LONG, SHORT = 65_536, 4096  # tokens of context: enough for each agent's instructions, and too few for any
START_S, LIMIT_S = 120.0, 240.0
OVERFLOW_S = 60.0  # in which an agent has seen that the context is full; some then try to compact it for ever


class Run(NamedTuple):
    """Text that an agent has printed, and how long it ran."""

    text: str
    seconds: float


class Agent(NamedTuple):
    """An agent: how it is pointed at a server and asked, and the words by which it says that the context is full."""

    name: str
    configure: Callable[[Path, str], dict[str, str]]
    command: Callable[[str], list[str]]
    resume: Callable[[str], list[str]] | None  # goes on after an answer that was cut, if the agent stops there
    overflow: str


def program(name: str) -> str:
    return str(TOOLS / "node_modules" / ".bin" / name)


def configure_claude(home: Path, url: str) -> dict[str, str]:
    names = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "demo")
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER"), "1")
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", **names, **quiet}


def configure_codex(home: Path, url: str) -> dict[str, str]:
    folder = home / ".codex"
    folder.mkdir()
    provider = f'[model_providers.weft]\nname = "Weft"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (folder / "config.toml").write_text(f'model = "demo"\nmodel_provider = "weft"\n{provider}')
    return {}


def configure_opencode(home: Path, url: str) -> dict[str, str]:
    model = {"name": "demo", "limit": {"context": LONG, "output": 8192}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Weft", "options": options, "models": {"demo": model}}
    names = {"model": "weft/demo", "small_model": "weft/demo"}
    settings = {**names, "autoupdate": False, "provider": {"weft": provider}, "permission": {"bash": "allow"}}
    (home / "opencode.json").write_text(json.dumps(settings))
    return {}


CODEX = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
AGENTS = (
    Agent(
        "Claude Code",
        configure_claude,
        lambda task: [program("claude"), "-p", task, "--output-format", "json", "--allowedTools", "Bash"],
        None,
        r"prompt_too_long|Prompt is too long",
    ),
    Agent(
        "Codex",
        configure_codex,
        lambda task: [program("codex"), *CODEX, task],
        lambda task: [program("codex"), *CODEX, "resume", "--last", task],
        r"context window|context_length_exceeded",
    ),
    Agent(
        "opencode",
        configure_opencode,
        lambda task: [program("opencode"), "run", "--format", "json", task],
        None,
        r"ContextOverflowError",
    ),
)


class Official(NamedTuple):
    """An official client: a conversation with the model, and one that is too long; both raise AssertionError."""

    name: str
    converse: Callable[[str, str, int, int], str]
    overflow: Callable[[str], None]


EVERYBODY: tuple[Agent | Official, ...] = (*AGENTS, *(Official(*row) for row in clients.CLIENTS))


def install() -> None:
    """Install the agents beside the environment, unless they are there."""
    if all((TOOLS / "node_modules" / package.rpartition("@")[0]).exists() for package in PACKAGES):
        return
    if shutil.which("npm") is None:
        sys.exit("npm is missing; install Node 20 or later")
    TOOLS.mkdir(exist_ok=True)
    quiet = ["--no-fund", "--no-audit", "--loglevel=error", "--prefix", str(TOOLS)]
    subprocess.run(["npm", "install", *quiet, *PACKAGES], check=True, stdout=sys.stderr)
    for package, script in PACKAGES.items():
        if script is not None:
            folder = TOOLS / "node_modules" / package.rpartition("@")[0]
            subprocess.run(["node", script], cwd=folder, check=True, stdout=sys.stderr)


@contextmanager
def running(command: list[str], url: str, log: Path) -> Iterator[str]:
    """A server that answers /health at `url`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        until = time.monotonic() + START_S
        while not answers(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"{command} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return b'"demo"' in response.read()
    except OSError:
        return False


def ask(command: list[str], home: Path, environment: dict[str, str], limit_s: float) -> Run:
    """Run an agent in an empty home; it is killed after `limit_s`."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=home,
        env={**kept, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return Run(output.decode(errors="replace"), time.monotonic() - began)


def converse(agent: Agent, url: str, mark: str) -> dict[str, object]:
    """Have a conversation of TURNS calls, of which one is cut."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        environment = agent.configure(home, url)
        run = ask(agent.command(f"weft-task {mark} turns {TURNS} cut {CUT}"), home, environment, LIMIT_S)
        texts = run.text
        if agent.resume is not None and f"done {mark} {TURNS}" not in texts:
            texts += ask(agent.resume("go on"), home, environment, LIMIT_S).text
    return {"ok": f"done {mark} {TURNS}" in texts, "seconds": round(run.seconds, 1), "end": texts[-300:]}


def overflow(agent: Agent, url: str) -> dict[str, object]:
    """Have a conversation that is longer than the context."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run = ask(agent.command("say hi"), home, agent.configure(home, url), OVERFLOW_S)
    return {"ok": bool(re.search(agent.overflow, run.text)), "seconds": round(run.seconds, 1), "end": run.text[-300:]}


def ask_client(client: Official, url: str, case: str, mark: str) -> dict[str, object]:
    """Have one of an official client's conversations."""
    began = time.monotonic()
    try:
        end = client.converse(url, mark, TURNS, CUT) if case == TEN else client.overflow(url)
        ok = case != TEN or end == f"done {mark} {TURNS}"
    except Exception as error:
        ok, end = False, f"{type(error).__name__}: {error}"
    return {"ok": ok, "seconds": round(time.monotonic() - began, 1), "end": end}


def ask_agent(agent: Agent, url: str, case: str, mark: str) -> dict[str, object]:
    """Have one of an agent's conversations."""
    return converse(agent, url, mark) if case == TEN else overflow(agent, url)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/conformance agents", description=__doc__.split("\n")[0])
    parser.add_argument("--agent", choices=[one.name for one in EVERYBODY])
    parser.add_argument("--port", type=int, default=18_711, help="the first of four")
    given = parser.parse_args()
    wanted = [one for one in EVERYBODY if given.agent in (None, one.name)]
    if any(isinstance(one, Agent) for one in wanted):
        install()
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as logs:
        for case, length in ((TEN, LONG), ("overflow", SHORT)):
            direct, gateway = (f"http://127.0.0.1:{given.port + add}" for add in (0, 1))
            server = [sys.executable, "-m", SCRIPTED, str(given.port), str(length)]
            front = [sys.executable, "-m", "weft", "gateway", "--upstream", direct, "--port", str(given.port + 1)]
            with running(server, direct, Path(logs, "server")), running(front, gateway, Path(logs, "gateway")):
                for place, url in (("directly", direct), ("through the gateway", gateway)):
                    for number, one in enumerate(wanted):
                        mark = f"t{number}{place[0]}"
                        run = partial(ask_agent, one) if isinstance(one, Agent) else partial(ask_client, one)
                        found = run(url, case, mark)
                        results[f"{one.name}, {case}, {place}"] = found
                        print("ok  " if found["ok"] else "FAIL", f"{one.name}, {case}, {place}", file=sys.stderr)
    print(json.dumps(results, indent=1))
    sys.exit(not all(found["ok"] for found in results.values()))


if __name__ == "__main__":
    main()
