"""Downloads from a hub of our own: what comes, what is continued, and what each fault says."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from tests.pure import hubs
from tests.pure.hubs import COMMIT, Fault, Hub, running_hub
from tests.refusals import has_values, refuses
from weft.checkpoint.hub import fetch_progress, hub
from weft.checkpoint.hub import files as hub_files
from weft.checkpoint.hub.hub import fetch_repository
from weft.errors import ModelError

NAME = "owner/model"
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": b'{"architectures": []}',
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": WEIGHTS[::-1],
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": WEIGHTS,
}
WANTED = {"config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    # Bytes that the library writes at once: of a broken piece it keeps nothing.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before the library tries again
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        # What the library makes of HF_ENDPOINT when it is imported.
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.repositories[NAME] = dict(FILES)
        yield server


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    def fetch(name: str = NAME, token: str | None = None, *, revision: str | None = None, weights: bool = True) -> Path:
        return fetch_repository(name, revision=revision, token=token, folder=str(tmp_path / "hub"), weights=weights)

    return fetch


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_is_wanted_comes_once(server: Hub, fetch: Fetch) -> None:
    folder = fetch()
    assert names(folder) == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    server.requests.clear()
    assert fetch() == folder
    assert not server.asked("GET", "/resolve/")


def test_a_dummy_needs_no_weights(server: Hub, fetch: Fetch) -> None:
    assert names(fetch(weights=False)) == {"config.json", "tokenizer.json"}


def test_the_token_goes_along(server: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(token="hf_flag")
    assert {request.token for request in server.requests} == {"Bearer hf_flag"}
    server.requests.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    fetch()
    assert {request.token for request in server.requests} == {"Bearer hf_environment"}


def test_a_connection_that_is_cut_is_continued(server: Hub, fetch: Fetch) -> None:
    server.faults = [Fault("model-1", bytes=100_000, times=1), Fault("model-1", bytes=50_000, times=1)]
    folder = fetch()
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert [request.first for request in server.asked("GET", "model-1")] == [0, 100_000, 150_000]


def test_a_later_start_continues(server: Hub, fetch: Fetch) -> None:
    server.faults = [Fault("model-1", bytes=100_000, times=1), Fault("model-1", status=500)]
    with refuses(ModelError, "hub-status", NAME, server.url, 500):
        fetch()
    server.faults = []
    folder = fetch()
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert server.asked("GET", "model-1")[-1].first == 100_000


def test_a_hub_that_is_gone_leaves_what_is_here(server: Hub, fetch: Fetch) -> None:
    folder = fetch()
    server.faults = [Fault("/api/", status=503)]
    assert fetch() == folder
    server.faults = [Fault("/api/", status=401)]
    assert fetch() == folder


def test_offline(server: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refuses(ModelError, "model-not-downloaded", NAME, "HF_HUB_OFFLINE"):
        fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert fetch() == folder
    assert not server.requests


def test_refusals(server: Hub, fetch: Fetch) -> None:
    page = f"{server.url}/{NAME}"
    with refuses(ModelError, "no-such-model", "owner/other", server.url, "HF_TOKEN"):
        fetch("owner/other")
    # What the hub says of a gated model, to one who has not accepted its terms: at its files, or already at its list.
    for part in ("/resolve/", "/api/"):
        server.faults = [Fault(part, status=403, headers={"X-Error-Code": "GatedRepo"})]
        with refuses(ModelError, "gated-model", NAME, page, "HF_TOKEN"):
            fetch()
    server.faults = [Fault("/resolve/", status=403)]
    with refuses(ModelError, "hub-forbidden", NAME, page, "HF_TOKEN"):
        fetch()
    server.faults = [Fault("/resolve/", status=401, headers={"X-Error-Message": "Invalid credentials in header"})]
    with refuses(ModelError, "hub-token-refused", server.url, NAME, "HF_TOKEN"):
        fetch(token="hf_wrong")
    server.faults = [Fault("/api/", status=404, headers={"X-Error-Code": "RevisionNotFound"})]
    with refuses(ModelError, "no-such-revision", NAME, "'v9'", server.url):
        fetch(revision="v9")
    server.faults = [Fault("/api/", status=429, headers={"Retry-After": "17"})]
    with refuses(ModelError, "hub-limits-requests", server.url, "17 s", "HF_TOKEN"):
        fetch()


def test_a_hub_that_limits_requests_is_asked_again(server: Hub, fetch: Fetch) -> None:
    server.faults = [Fault("/resolve/", status=429, headers={"Retry-After": "1"}, times=3)]
    assert names(fetch()) == WANTED


@pytest.mark.parametrize("name", ["model-2.safetensors", "tokenizer.json"])
def test_a_file_with_a_wrong_hash_is_not_kept(server: Hub, fetch: Fetch, tmp_path: Path, name: str) -> None:
    changed = server.changed[name] = FILES[name][:-1] + b"!"
    with refuses(ModelError, "wrong-hash", name, NAME):
        fetch()
    kept = [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and path.read_bytes() == changed]
    assert not kept
    server.changed.clear()
    assert (fetch() / name).read_bytes() == FILES[name]


def test_a_disk_without_room(server: Hub, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 400_000})
    with monkeypatch.context() as patched:
        patched.setattr(hub_files.shutil, "disk_usage", lambda path: usage)
        with refuses(ModelError, "disk-full", NAME, tmp_path, "HF_HOME"):
            fetch()
        assert not server.asked("GET", "/resolve/")
    server.faults = [Fault("model-1", bytes=250_000, times=1), Fault("model-1", status=500)]
    with refuses(ModelError, "hub-status"):
        fetch()
    server.faults = []
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda path: usage)
    fetch()  # since a part of the files is here


def test_room_is_counted_for_what_is_missing(
    server: Hub, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 400_000}))
    blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"another{hub_files.PARTIAL}").write_bytes(WEIGHTS)  # a part of a file that nobody wants now
    with refuses(ModelError, "disk-full"):
        fetch()
    (blobs / hashlib.sha256(WEIGHTS).hexdigest()).write_bytes(WEIGHTS)  # the content of a file of another commit
    assert names(fetch()) == WANTED


def test_a_second_process_waits_for_the_first(
    server: Hub, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = tmp_path / "hub" / "models--owner--model" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
    blob.parent.mkdir(parents=True)
    partial = blob.with_name(blob.name + hub_files.PARTIAL)
    with partial.open("ab") as first:
        fcntl.flock(first, fcntl.LOCK_EX)

        def finish(seconds: float) -> None:
            """The first process gets the rest while the second waits."""
            if partial.exists():
                first.write(WEIGHTS)
                first.flush()
                partial.rename(blob)
                fcntl.flock(first, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", finish)
        folder = fetch()
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert not server.asked("GET", "model-1")
    assert len(server.asked("GET", "model-2")) == 1


def test_a_file_system_without_locks(server: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    # The library's own lock works.
    stand_in = SimpleNamespace(flock=refuse, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr(hub_files, "fcntl", stand_in)
    assert names(fetch()) == WANTED


def test_a_whole_part_is_only_hashed(server: Hub, fetch: Fetch, tmp_path: Path) -> None:
    blob = tmp_path / "hub" / "models--owner--model" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + hub_files.PARTIAL).write_bytes(WEIGHTS)
    assert (fetch() / "model-1.safetensors").read_bytes() == WEIGHTS
    assert not server.asked("GET", "model-1")


def test_what_is_not_hashed_is_not_taken_for_whole(
    server: Hub, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    server.changed["model-1.safetensors"] = WEIGHTS[:-1] + b"?"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(hub_files, "_hash_file", interrupted)
        fetch()
    assert not list((tmp_path / "hub").rglob(hashlib.sha256(WEIGHTS).hexdigest()))
    with refuses(ModelError, "wrong-hash", "model-1.safetensors"):
        fetch()


def test_the_first_failure_ends_the_others(server: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def fetch_one(commit: object, file: hub_files.HubFile, token: object, folder: object, progress: Any) -> None:
        if file.name == "model-2.safetensors":
            raise ModelError("the disk is full", code="disk-full")
        for _ in range(500):  # at most: what ends only with its own file never ends here
            threading.Event().wait(0.01)
            progress.add(file.name, 0)
        ended.append(file.name)

    monkeypatch.setattr(hub_files, "_fetch_file", fetch_one)
    with refuses(ModelError, "disk-full"):
        fetch()
    assert not ended


def test_a_disk_that_fills_up(server: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_progress.FileBar, "update", no_room)
    with refuses(ModelError, "disk-full", NAME, "HF_HOME"):
        fetch()


@pytest.mark.long  # processes; the faults are tested one by one above
def test_the_command_on_a_disk_of_a_megabyte(server: Hub, tmp_path: Path) -> None:
    """`weft pull` with the environment that users set, on a file system that is too small, and then on a larger one."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("mounts a small file system, which this system does not allow")
    server.repositories[NAME] |= {"model-1.safetensors": WEIGHTS * 10}  # 3 MB
    folder = tmp_path / "disk"
    folder.mkdir()
    variables = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_environment", "HF_HOME": str(folder)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | variables
    ended = {}
    for size in ("1m", "8m"):
        mount = f'mount -t tmpfs -o size={size} none {folder} && "$@" && ls -lR {folder}'
        words = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-m", "weft", "pull", NAME]
        ended[size] = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ended["1m"].returncode == 1
    has_values(ended["1m"].stderr, folder, "1 MB")
    assert ended["8m"].returncode == 0 and "3000000" in ended["8m"].stdout, ended["8m"].stderr
    assert {one.token for one in server.requests if NAME in one.path} == {"Bearer hf_environment"}


def test_a_log_has_the_sum(
    server: Hub, fetch: Fetch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    monkeypatch.setattr(fetch_progress, "LINE_S", 0.0)
    with caplog.at_level(logging.INFO, "weft"):
        fetch()
    assert len(caplog.messages) > 4
    assert all(NAME in line and "MB/s" in line for line in caplog.messages)
    assert re.search(r"\b1 MB of 1 MB .*\b4 of 4 ", caplog.messages[-1])


def test_a_terminal_has_a_bar_for_each_file_and_the_whole(
    server: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    shown: list[tuple[str, int, int]] = []
    original = fetch_progress.Bars.show

    def show(bars: fetch_progress.Bars, file: str, done: int, whole: int) -> None:
        shown.append((file, done, whole))
        original(bars, file, done, whole)

    monkeypatch.setattr(fetch_progress.Bars, "show", show)
    fetch()
    assert {file for file, _, _ in shown} == WANTED
    last = {file: done for file, done, _ in shown}
    assert last == {name: len(FILES[name]) for name in WANTED}
    assert shown[-1][2] == sum(last.values())
    assert NAME in capsys.readouterr().err


def test_the_commit_is_the_one_that_the_hub_gives(server: Hub, fetch: Fetch) -> None:
    folder = fetch()
    assert folder.name == COMMIT
    assert hub.cached_repository(NAME, str(folder.parents[2])) == folder


@pytest.fixture(autouse=True)
def no_cached_sessions() -> Iterator[None]:
    """The library keeps connections; those to a hub that has ended are not for the next one."""
    yield
    from huggingface_hub.utils import _http

    _http.close_session()


# --- A hub that lies


@pytest.mark.parametrize("hash", ["/any/path", "../../../any", "a" * 63, "A" * 64, ""])
@pytest.mark.parametrize("place", ["list", "file"])
def test_a_hash_that_is_none_is_refused(
    server: Hub, fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hash: str, place: str
) -> None:
    """Each becomes a name in the cache: as a path it would be written anywhere."""
    describe = hubs.description

    def lie(name: str, content: bytes, *, is_tree: bool) -> dict[str, Any]:
        row = describe(name, content, is_tree=is_tree)
        if "lfs" in row and is_tree == (place == "file"):
            row["lfs"]["oid" if is_tree else "sha256"] = hash
        return row

    monkeypatch.setattr(hubs, "description", lie)
    if place == "file" and "/" not in hash:
        return  # a name like any other
    with refuses(ModelError, "wrong-hub-answer", server.url):
        fetch()
    assert not list(tmp_path.rglob("any*"))
    assert {path.name for path in tmp_path.iterdir()} <= {"hub"}


@pytest.mark.parametrize("name", ["../evil.json", "/evil.json", "a/../../evil.json", "a\\evil.json"])
def test_a_file_s_name_that_leaves_the_folder_is_refused(server: Hub, fetch: Fetch, tmp_path: Path, name: str) -> None:
    server.repositories[NAME][name] = b"{}"
    with refuses(ModelError, "wrong-hub-answer", server.url):
        fetch()
    assert not list(tmp_path.rglob("*evil*"))
