"""weft cluster up, down and pull with OpenSSH's own client and server: two hosts, which are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cpu import tiny
from tests.net.namespaces import HOSTS, Cable, obstacle

SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if os.path.exists(path)), None)
reason = obstacle() or ("" if SSHD and shutil.which("ssh") else "ssh between hosts needs OpenSSH's client and server")
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

ROOT = Path(__file__).parents[2]
PORT = 2299
WAIT_S = 90


class Site:
    """Two hosts with sshd, and the machine of a person, who has a key for both: the first host.

    `run` is a command `weft` of that person. Each host has a cache of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.cable = folder, Cable()
        self.daemons: list[subprocess.Popen[bytes]] = []
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "identity"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        shutil.copy(folder / "identity.pub", folder / "authorized_keys")
        host_key = (folder / "host_key.pub").read_text().split()[:2]
        (folder / "known_hosts").write_text("".join(f"[{host}]:{PORT} {' '.join(host_key)}\n" for host in HOSTS))
        for host in range(2):
            self._start_daemon(host)
        # The person's settings, which ssh finds by the home directory of the user that runs the tests.
        program = folder / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        program.chmod(0o755)
        self.trust(folder / "identity", folder / "known_hosts")

    def _start_daemon(self, host: int) -> None:
        config = self.folder / f"sshd{host}"
        variables = f"PYTHONPATH={ROOT}/src:{ROOT} XDG_CACHE_HOME={self.folder}/cache{host}"
        lines = [
            f"ListenAddress {HOSTS[host]}:{PORT}",
            f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            f"PidFile {self.folder}/pid{host}",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            f"SetEnv {variables}",
        ]
        config.write_text("\n".join(lines) + "\n")
        assert SSHD
        words = [*self.cable.inside(host), SSHD, "-D", "-e", "-f", str(config)]
        with (self.folder / f"sshd{host}.log").open("w") as log:
            self.daemons.append(subprocess.Popen(words, stderr=log))
        deadline = time.monotonic() + WAIT_S
        while "Server listening" not in (self.folder / f"sshd{host}.log").read_text():
            assert time.monotonic() < deadline and self.daemons[-1].poll() is None
            time.sleep(0.02)

    def trust(self, identity: Path, known: Path) -> None:
        """Have the person use this key, and know these hosts."""
        lines = [f"IdentityFile {identity}", "IdentitiesOnly yes", f"UserKnownHostsFile {known}", "LogLevel ERROR"]
        (self.folder / "ssh_config").write_text("\n".join([*lines, "GlobalKnownHostsFile /dev/null"]) + "\n")

    def write(self, text: str) -> str:
        file = self.folder / "hosts.yaml"
        rows = "".join(f"  - {{host: {host}, port: {PORT}, python: {sys.executable}}}\n" for host in HOSTS)
        file.write_text(f"hosts:\n{rows}{text}")
        return str(file)

    def start(self, *words: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
        inherited["PATH"] = f"{self.folder}/bin:{inherited['PATH']}"
        return subprocess.Popen(
            [*self.cable.inside(0), sys.executable, "-m", "weft", "cluster", *words],
            env=inherited | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "XDG_CACHE_HOME": f"{self.folder}/person"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def servers(self) -> list[psutil.Process]:
        """The processes of weft serve on both hosts."""
        found = []
        for process in psutil.process_iter():
            try:
                words, cache = process.cmdline(), process.environ().get("XDG_CACHE_HOME", "")
            except psutil.Error:
                continue
            if words[1:5] == ["-P", "-m", "weft", "serve"] and cache.startswith(str(self.folder)):
                found.append(process)
        return found

    def close(self) -> None:
        for process in self.servers():
            process.kill()
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        self.cable.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("ssh"))
    yield site
    site.close()


@pytest.fixture
def hosts(site: Site) -> Iterator[str]:
    """A file whose model has a name that a shell would take apart."""
    model = tiny.write(site.folder / "a model; touch $HOME 'x'")
    flags = (
        "{pipeline-parallel-size: 2, load-format: dummy, dtype: float32, kv-cache-memory-bytes: 1000000, port: 8123}"
    )
    yield site.write(f"model: {json.dumps(str(model))}\nserve: {flags}\n")
    for process in site.servers():
        process.kill()
        process.wait(WAIT_S)


def visible_words() -> str:
    """The arguments of every process, as ps shows them to everybody."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(file.read_bytes().decode(errors="replace"))
    return "\n".join(lines)


def test_an_engine_on_two_hosts_from_up_to_down(site: Site, hosts: str) -> None:
    """With certificates. No secret is in any process's words at any time that is looked at; the second `up` finds what
    runs; nothing is left."""
    assert site.run("cert", hosts)[0] == 0
    with open(hosts, "a") as file:
        file.write("certificates: certificates\n")
    process = site.start("up", hosts)
    seen = []
    while process.poll() is None:
        seen.append(visible_words())
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == 0, (out, err)
    key = Path(hosts).with_suffix(".key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_text().strip()
    assert len(seen) > 5 and not any(secret in words or "PRIVATE KEY" in words for words in seen)
    assert secret not in out + err
    url = re.search(r"is served at (\S+);", out)
    assert url, out
    assert [f"node {node} ({host}): started" in out for node, host in enumerate(HOSTS)] == [True, True]
    body = json.dumps({"model": "x", "prompt": "ab", "max_tokens": 4, "ignore_eos": True})
    answer = subprocess.run(
        [*site.cable.inside(0), sys.executable, "-c", ASK, "http://127.0.0.1:8123"],
        input=body,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert answer.returncode == 0 and json.loads(answer.stdout)["usage"]["completion_tokens"] == 4, answer.stderr
    first = {process.pid for process in site.servers()}
    status, out, _ = site.run("up", hosts)
    assert status == 0 and out.count("runs already") == 2 and {process.pid for process in site.servers()} == first
    status, out, _ = site.run("down", hosts)
    assert status == 0 and "node 0" in out and "stopped process" in out, out
    assert site.servers() == []
    assert site.run("down", hosts)[1].count("nothing runs") == 2
    assert list(site.folder.glob("cache*/weft/cluster/*/key")) == []


ASK = """
import json, sys, urllib.request
url, body = sys.argv[1], json.load(sys.stdin)
body["model"] = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request).read().decode())
"""


def test_a_start_that_fails_leaves_nothing(site: Site) -> None:
    """The other node's model is missing: the cause, and the end of what was started."""
    hosts = site.write("model: /nowhere/at all\nserve: {pipeline-parallel-size: 2}\n")
    status, _, err = site.run("up", hosts)
    assert status == 1 and re.search(r"node \d \(\S+\): the server has ended: .*/nowhere/at all", err), err
    assert site.servers() == []


@pytest.mark.long  # the agent's own tests show the same
def test_a_person_who_gives_up_leaves_nothing(site: Site, hosts: str) -> None:
    process = site.start("up", hosts)
    deadline = time.monotonic() + WAIT_S
    while len(site.servers()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and site.servers() == []


@pytest.mark.parametrize("fault", ["key", "host"])
def test_hosts_that_ssh_does_not_reach(site: Site, hosts: str, fault: str) -> None:
    """Never a question: an unknown host and a person without a key get a way out."""
    stranger = site.folder / f"stranger-{fault}"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    empty = site.folder / "empty"
    empty.write_text("")
    right = site.folder / "identity", site.folder / "known_hosts"
    try:
        site.trust(*((stranger, right[1]) if fault == "key" else (right[0], empty)))
        status, out, _ = site.run("down", hosts)
    finally:
        site.trust(*right)
    said = f"ssh-copy-id -p {PORT}" if fault == "key" else f"connect once by hand, and compare its key: ssh -p {PORT}"
    assert status == 1 and out.count(said) == 2, out


@pytest.mark.long  # the agent's own tests show the same
def test_a_model_that_is_fetched_nowhere_is_said_for_each_node(site: Site, hosts: str) -> None:
    status, out, _ = site.run("pull", "no such model; x", "--hosts", hosts)
    lines = out.splitlines()
    assert status == 1 and len({line.partition(":")[0] for line in lines}) == 2, out
