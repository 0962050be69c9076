"""weft support-bundle: what is in it, and that no planted key is."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure.commands import refused_line, weft, weft_json
from tests.pure.worlds import World
from weft import logs
from weft.cli.machine import support_bundle
from weft.monitor.processes import Process, own_processes
from weft.monitor.secrets import REMOVED, Secrets, names_secret
from weft.monitor.server_logs import LEFT_OUT, without_prompts

# Where a secret is planted, and the secret.
PLANTED = {
    "flag": "planted-in-a-flag-1",
    "flag with =": "planted-in-a-flag-2",
    "variable": "planted-in-a-variable",
    "admin": "planted-admin-key",
    "cloud": "planted/in+another=variable",
    "config": "planted-in-a-config",
    "nested": "planted-in-a-header",
    "key file": "planted-in-a-key-file",
    "hub": "hf_plantedInTheHubsTokenFile",
    "log": "sk-plantedInTheLogOnly0123",
    "url": "planted-password-of-a-url",
}
CONFIG = f"""\
model: tiny
api-key: [{PLANTED["config"]}]
upstreams:
  - url: https://user:{PLANTED["url"]}@cloud.example/v1
    headers: {{Authorization: "Bearer {PLANTED["nested"]}"}}
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process that looks like a server with keys everywhere; only it is found."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/token").write_text(PLANTED["hub"])
    (tmp_path / "weft.yaml").write_text(CONFIG)
    (tmp_path / "keys.txt").write_text(f"# of the team\nalice={PLANTED['key file']}\n")
    lines = [
        f"ERROR 05-01 10:00:00 no route to https://user:{PLANTED['url']}@cloud.example",
        *(f"seen {key}" for key in PLANTED.values()),
        "INFO 05-01 10:00:00 request 0-0: prompt 'sesame', SamplingParams()",
    ]
    (tmp_path / "serve").write_text(
        f"import sys, time\nprint(*{lines!r}, sep='\\n', file=sys.stderr, flush=True)\ntime.sleep(600)"
    )
    words = ["weft", "serve", "tiny", "--api-key", PLANTED["flag"], f"--hf-token={PLANTED['flag with =']}"]
    words += ["--config", "weft.yaml", "--api-key-file", "keys.txt", "--max-num-seqs", "7"]
    variables = {"VLLM_API_KEY": PLANTED["variable"], "WEFT_ADMIN_KEY": PLANTED["admin"], "OMP_NUM_THREADS": "1"}
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            words,
            executable=sys.executable,
            cwd=tmp_path,
            stderr=log,
            env={**os.environ, **variables, "AWS_SECRET_ACCESS_KEY": PLANTED["cloud"]},
        )
    try:
        deadline = time.monotonic() + 60
        while "sesame" not in (tmp_path / "server.log").read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)

        def found() -> Iterator[Process]:
            return (one for one in own_processes() if one.pid == process.pid)

        monkeypatch.setattr(support_bundle, "own_processes", found)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def contents(path: Path) -> dict[str, str]:
    """Text of each file of an archive, by its name below the archive's one folder."""
    with tarfile.open(path) as archive:
        texts = {}
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None and entry.mode == 0o600
            texts[entry.name.partition("/")[2]] = file.read().decode()
    return texts


def test_nothing_that_was_planted_is_in_it(server: int, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    status, told = weft_json("support-bundle", "--output", str(path), "--log", str(tmp_path / "server.log"))
    assert status == 0 and told["file"] == str(path) and stat.S_IMODE(path.stat().st_mode) == 0o600
    texts = contents(path)
    assert sorted(texts) == told["parts"]
    assert {place for place, key in PLANTED.items() if any(key in text for text in texts.values())} == set()
    # What is wanted is there.
    command = json.loads(texts[f"servers/{server}-command.json"])
    assert command["command"][:5] == ["weft", "serve", "tiny", "--api-key", REMOVED]
    assert command["command"][-2:] == ["--max-num-seqs", "7"]
    assert command["environment"]["VLLM_API_KEY"] == REMOVED and command["environment"]["OMP_NUM_THREADS"] == "1"
    assert "AWS_SECRET_ACCESS_KEY" not in command["environment"], "no variable of ours"
    assert command["--config"]["model"] == "tiny" and command["--config"]["api-key"] == REMOVED
    assert "sesame" not in texts[f"logs/{server}.log"] and "sesame" in texts["logs/given-0-server.log"]
    for log in (f"logs/{server}.log", "logs/given-0-server.log"):
        assert f"no route to https://{REMOVED}@cloud.example" in texts[log]
    assert json.loads(texts["versions.json"])["python"] == sys.version
    checks = json.loads(texts["doctor.json"])
    assert {"disk", "memory"} <= {check["name"] for check in checks["machine"]["checks"]}
    assert "host" in json.loads(texts["hardware.json"]) and "torch" in json.loads(texts["versions.json"])["packages"]


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_lines_with_prompts_are_left_out(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the lines that a server really writes, as its file, the journal and a set's front have them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logs.JsonLines() if log_format == "json" else logs.Printable(logs.TEXT, logs.DATE))
    logger = logging.getLogger("weft")
    logger.addHandler(handler)
    level = logger.level
    try:
        logger.setLevel("INFO")
        logger.info("before")
        await World(enable_log_requests=True, max_model_len=4096).complete(prompt="sesame " * 100)
        logger.info("after")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "sesame" in lines[1]
    middle = len(lines[1]) // 2  # where the journal may cut
    cut = [lines[0], lines[1][:middle], lines[1][middle:], lines[2]]
    for prefix in ("", "2026-05-01T10:00:00+0000 host weft[17]: ", "tiny | "):
        for written in (lines, cut):
            cleaned = without_prompts("\n".join(prefix + line for line in written))
            assert cleaned.split("\n") == [prefix + lines[0], LEFT_OUT, prefix + lines[2]]
        rest = without_prompts("\n".join(prefix + line for line in cut[2:]), logs_prompts=True)
        assert rest == prefix + lines[2], "the log's first part is the rest of a prompt"
    assert without_prompts("weft: hello\nfree text") == "weft: hello\nfree text"


def test_an_archive_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_bundle, "collect_parts", lambda secrets, logs: {"about.txt": "a"})
    monkeypatch.setattr(support_bundle, "running_servers", list)
    path = tmp_path / "bundle.tar.gz"
    assert weft("support-bundle", "--output", str(path))[0] == 0
    refused_line(["support-bundle", "--output", str(path)], 1, "bundle-exists", "--output")
    refused_line(
        ["support-bundle", "--output", str(tmp_path / "no/bundle.tar.gz")], 1, "cannot-write-bundle", "--output"
    )


def test_a_log_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_bundle, "own_processes", list)
    monkeypatch.setattr(support_bundle, "running_servers", list)
    refused_line(["support-bundle", "--log", str(tmp_path / "missing")], 1, "log-unreadable", "missing")


@pytest.mark.parametrize(
    "name", ["--api-key", "HF_TOKEN", "api_key", "apiKey", "keys", "AWS_SECRET_ACCESS_KEY", "password"]
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["--tokenizer", "--max-tokens", "--api-key-file", "--ssl-keyfile", "keepalive", "monkey", "per-token-file"]
)
def test_names_of_other_settings(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {REMOVED}"),
        ('{"api_key": "abc", "n": 1}', f'{{"api_key": "{REMOVED}", "n": 1}}'),
        ("GET /v1?api_key=abc&n=1", f"GET /v1?api_key={REMOVED}&n=1"),
        ("weft serve x --hf-token abc --port 1", f"weft serve x --hf-token {REMOVED} --port 1"),
        ("http://me:abc@host/path", f"http://{REMOVED}@host/path"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\nx", f"{REMOVED}\nx"),
        ('"kv_bytes_per_token": 15360', '"kv_bytes_per_token": 15360'),
        ("give the key in the environment: VLLM_API_KEY, WEFT_ADMIN_KEY", None),
        ("GPU KV cache size: 643,232 tokens", None),
    ],
)
def test_forms_of_secrets(text: str, clean: str | None) -> None:
    assert Secrets().clean(text) == (text if clean is None else clean)


def test_values_of_variables_are_shown_by_a_list_of_names() -> None:
    """A name that nobody thought of has a value that may be a key."""
    secrets = Secrets()
    planted = {"RAY_AUTH": "planted-1", "HF_XET_PAT": "planted-2", "WEFT_OTLP_HEADERS": "x-api=planted-3"}
    planted |= {"NCCL_SOMETHING": "planted-4", "TRITON_CACHE_MANAGER": "planted-5"}
    shown = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_SOCKET_IFNAME": "eth0", "HF_ENDPOINT": "https://u:planted-6@mirror/x"}
    read = support_bundle.read_variables({**planted, **shown, "OTHER_TOKENISH": "planted-7"}, secrets)
    assert read.keys() == {*planted, *shown}
    assert all(read[name] == support_bundle.NOT_SHOWN for name in planted)
    assert read["CUDA_VISIBLE_DEVICES"] == "0,1" and read["NCCL_SOCKET_IFNAME"] == "eth0"
    text = secrets.clean(json.dumps(read) + " the log says planted-1, x-api=planted-3 and planted-6")
    assert not [number for number in (1, 2, 3, 4, 5, 6) if f"planted-{number}" in text]
