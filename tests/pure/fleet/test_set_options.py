"""The options of `weft serve` for several models: none is forgotten, and folders of sockets are one user's."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pure.worlds import World
from tests.refusals import refuses
from weft.cli.commands import COMMANDS
from weft.cli.flags.flags import serve_options
from weft.cli.parser import parse_command
from weft.config import EngineConfig, Scope, declared_options
from weft.errors import ConfigError
from weft.fleet.hosting import member as members
from weft.fleet.hosting.member import Member
from weft.fleet.hosting.model_set import ModelEntry, ModelSet
from weft.fleet.hosting.options import PASSED_ON, REFUSED, check_options, member_words, stall_limit
from weft.fleet.hosting.sockets import YOUNG_S, SocketFolder
from weft.http.clients import Client, header_of
from weft.http.errors import HttpError
from weft.http.options import ServeOptions

OTHERS: dict[str, Any] = {
    "shutdown_timeout": 7.0,
    "request_timeout": 8.0,
    "max_body_bytes": 9,
    "keepalive_interval": 3.0,
    "reset_on_error": True,
    "progress_timeout": 3.0,
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
    "disable_log_stats": True,
    "log_format": "json",
    "enable_log_requests": True,
    "response_role": "a b",
    "default_chat_template_kwargs": {"enable_thinking": False},
    "clip_max_tokens": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "served_model_name": ("a",),
    "root_path": "/a",
    "allowed_origins": ("http://a",),
    "enable_prefix_debug": True,
    "refuse_while_asleep": True,
    "profile_directory": "a",
    "storage_directory": "a",
    "storage_days": 1.0,
}
MODELS = ModelSet(entries=(ModelEntry(names=("one",), config=EngineConfig(model="one")),), source="set.yaml")


def test_every_option_that_the_address_does_not_have_alone_is_passed_on_or_refused() -> None:
    scopes = {name: option.scope for name, option in declared_options(ServeOptions).items()}
    assert {name for name, scope in scopes.items() if scope != Scope.ADDRESS} == {*PASSED_ON, *REFUSED}
    assert not {*PASSED_ON} & {*REFUSED}
    assert OTHERS.keys() == {*PASSED_ON, *REFUSED}, "this file tries each"


def test_models_servers_get_what_is_passed_on() -> None:
    assert member_words(ServeOptions()) == []
    given = {name: OTHERS[name] for name in PASSED_ON}
    words = member_words(ServeOptions(**given, port=9, api_key=("secret",)))
    assert serve_options(parse_command(COMMANDS["serve"], ["demo", *words]), {}) == ServeOptions(**given)
    assert stall_limit(words) == 3.0
    assert stall_limit([*words, "--progress-timeout=5"]) == 5.0
    assert stall_limit([]) == ServeOptions().progress_timeout


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_only_a_server_of_one_model_has_is_refused(name: str) -> None:
    with refuses(ConfigError, "option-of-one-model", f"--{name.replace('_', '-')}"):
        check_options(MODELS, ServeOptions(**{name: OTHERS[name]}))


@pytest.mark.parametrize(
    ("keys", "policy", "code"),
    [
        ("[{name: a, key: x, quota: {day: 5}}]", "fcfs", "quota-without-ledger"),
        ("[{name: a, key: x, weight: 2}]", "fcfs", "weight-without-policy"),
        ("[{name: a, key: x, weight: 2}]", "fair", ""),
    ],
)
def test_keys_of_which_a_set_could_not_keep_its_word(keys: str, policy: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(keys)
    path.chmod(0o600)
    entry = ModelEntry(names=("two",), config=EngineConfig(model="two", scheduling_policy=policy))
    models = ModelSet(entries=(*MODELS.entries, entry), source="set.yaml")
    options = ServeOptions(api_key_file=str(path))
    if code:
        with refuses(ConfigError, code):
            check_options(models, options)
    else:
        check_options(models, options)
    with refuses(ConfigError, "listing-without-keys"):
        check_options(MODELS, ServeOptions(open_listing=True))


@pytest.mark.parametrize("behind", [False, True])
async def test_only_behind_a_front_the_key_names_other_clients(behind: bool) -> None:
    """The server of one model of a set has one key, the front's, which tells whose requests it sends."""
    world = World(api_key=("one",), behind_front=behind)
    for name in ("a", "b"):
        told = header_of(Client(name, 5 + len(name), 3.0, salt=name)).decode()
        headers = {"Authorization": "Bearer one", "X-Weft-Client": told}
        assert (await world.post("/v1/completions", {"prompt": "ab"}, headers=headers)).status_code == 200
        assert (
            await world.post("/v1/completions", {"prompt": "ab"}, headers=headers | {"Authorization": "Bearer x"})
        ).status_code == 401
    first, second = world.engine.requests
    assert (first.identity != second.identity) is behind
    assert (first.owner, first.weight) == ((6, 3.0) if behind else (1, 1.0))


# The sockets of the models' servers


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_folder_of_sockets_is_this_user_s_and_goes(temporary: Path) -> None:
    folder = SocketFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.new_path() != folder.new_path()
    folder.close()
    assert not any(temporary.iterdir())


def test_a_folder_that_is_left_over_is_removed_and_one_in_use_is_not(temporary: Path) -> None:
    in_use, left_over, young = SocketFolder(), temporary / "weft-set-left", temporary / "weft-set-young"
    for folder in (left_over, young):
        folder.mkdir()
    (left_over / "a.sock").touch()
    before = time.time() - YOUNG_S - 1
    for folder in (left_over, in_use.path):
        os.utime(folder, (before, before))
    other = SocketFolder()
    assert {*temporary.iterdir()} == {in_use.path, other.path, young}
    other.close()
    in_use.close()


def test_a_folder_whose_sockets_would_have_too_long_paths(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("a" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with refuses(ConfigError, "no-socket-folder", "TMPDIR", "107"):
        SocketFolder()
    assert not any(deep.iterdir())


# Processes that do not start


async def test_a_process_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    member = Member("one", ["one"], environment={}, path=tmp_path / "a.sock")
    with refuses(HttpError, "model-down", "'one' cannot be started", "No such file"):
        await member.start("one", [])
    assert not member.is_running and member.pid is None
    await member.close()


@pytest.mark.parametrize("json_lines", [False, True])
async def test_a_process_that_ends_at_once_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], json_lines: bool
) -> None:
    """`python -m MODULE` of a module that is not there, with more words than a socket holds."""
    monkeypatch.setattr(members, "MODULE", "no_such_module")
    environment = {"WEFT_LOG_FORMAT": "json"} if json_lines else {}
    member = Member("one", ["one"], environment=environment, path=tmp_path / "a.sock")
    with refuses(HttpError, "model-down", "'one'", "no_such_module"):
        await member.start("one", ["--tokenizer=" + "x" * 1000])
    await member.close()
    lines = capfd.readouterr().err.splitlines()
    start = '{"model": "one", "message": ' if json_lines else "one | "
    assert lines and all(line.startswith(start) for line in lines)


async def test_a_process_that_a_signal_ends_is_not_said_to_end_by_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last line may have nothing to do with its end."""
    (tmp_path / "crashing.py").write_text(
        "import os, signal, sys\n"
        "print('the engine is ready', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.setattr(members, "MODULE", "crashing")
    member = Member("one", ["one"], environment={**os.environ, "PYTHONPATH": str(tmp_path)}, path=tmp_path / "a.sock")
    with refuses(HttpError, "model-down", "'one'", "killed by SIGSEGV"):
        await member.start("one", [])
    await member.close()
