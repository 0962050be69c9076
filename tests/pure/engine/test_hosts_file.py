"""hosts.yaml: what is refused before ssh or a shell sees it, and the commands that are made of the rest."""

from __future__ import annotations

import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pure.commands import refused_line, weft, weft_json
from tests.refusals import has_values, refusals, refuses
from weft.cli.cluster.hosts import create_launch, create_pull
from weft.engine.cluster import remote
from weft.engine.cluster.agent_messages import Examined, Started
from weft.engine.cluster.examination import Visit, node_checks
from weft.engine.cluster.hosts import Machine, check_model, read_hosts
from weft.engine.cluster.remote import ClusterLaunch, own_key, serve_arguments, start_task
from weft.engine.cluster.ssh import Gone, SshNode, quoted
from weft.errors import ConfigError
from weft.machine.check import Check

PAIR = "hosts: [{host: 10.0.0.1, gpus: 2}, {host: b, user: me, port: 2222, python: ~/w e/python, gpus: [3, 1]}]\n"


def written(folder: Path, text: str) -> str:
    file = folder / "hosts.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_is_read(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, PAIR + "model: m\nserve: {tensor-parallel-size: 2}\n"))
    assert [machine.visible_gpus for machine in hosts.hosts] == ["0,1", "3,1"]
    assert (hosts.name, hosts.key_file) == ("hosts", str(tmp_path / "hosts.key"))
    assert Machine(host="a").visible_gpus is None and Machine(host="a", gpus=0).visible_gpus == ""


WRONG = [
    "",
    "hosts: []",
    "hosts: [{}]",
    "hosts: [{host: a, password: secret}]",
    'hosts: [{host: "-oProxyCommand=touch /tmp/x"}]',
    'hosts: [{host: "a; reboot"}]',
    'hosts: [{host: "a b"}]',
    "hosts: [{host: a, user: -l}]",
    'hosts: [{host: a, user: "x y"}]',
    "hosts: [{host: a, port: 70000}]",
    "hosts: [{host: a, python: -c}]",
    'hosts: [{host: a, python: "/a\'b"}]',
    'hosts: [{host: a, python: "/a\\nb"}]',
    "hosts: [{host: a, python: ~root/python}]",
    "hosts: [{host: a, gpus: -1}]",
    "hosts: [{host: a}, {host: a}]",
    "hosts: [{host: a}]\nname: ../x",
    "hosts: [{host: a}]\nmodel: --help",
    "hosts: [{host: a}]\nvariables: [A=B]",
    "hosts: [{host: a}]\nhosts: [{host: b}]",
]


def test_files_that_are_refused(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    """Each is one line; nothing of them reaches a shell."""

    def read(text: str) -> object:
        return read_hosts(written(tmp_path, text))

    golden("errors/hosts.txt", refusals(read, WRONG, tmp_path))
    with refuses(ConfigError, "cannot-read-hosts", "none.yaml"):
        read_hosts(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("model", ["", "-x", "a\nb", "a\0b", "\x1b[2J"])
def test_a_model_that_would_be_something_else(model: str) -> None:
    with refuses(ConfigError, "bad-model-name"):
        check_model(model)


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("name", ["a b", "a;echo x", "a$(echo x)", 'a"b', "a`b`", "a&b|c>d*?#~"])
def test_a_quoted_program_is_that_program(tmp_path: Path, shell: str, name: str) -> None:
    program = tmp_path / name
    program.write_text('#!/bin/sh\necho "run $*"\n')
    program.chmod(0o755)
    printed = subprocess.run([shell, "-c", f"{quoted(str(program))} -P x"], capture_output=True, text=True, check=True)
    assert printed.stdout == "run -P x\n"


def test_home_stays_outside_the_quotes() -> None:
    assert quoted("~/my env/python") == "~/'my env/python'"


def test_ssh_asks_nothing_and_takes_no_option_from_the_file() -> None:
    command = SshNode(1, Machine(host="b", user="me", port=2222, python="/x y")).command()
    assert "BatchMode=yes" in command and "PasswordAuthentication=no" in command
    assert command[-8:-4] == ["-p", "2222", "-l", "me"] or command[-7:-3] == ["-p", "2222", "-l", "me"]
    assert command[-3:] == ["--", "b", "'/x y' -P -m weft.cli.cluster.node_agent"]


def test_words_of_head_and_nodes(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, PAIR))
    launch = ClusterLaunch(model="a b; c", flags=("--port=8001",))
    assert serve_arguments(hosts, launch, 0) == (
        *("a b; c", "--port=8001", "--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1"),
    )
    assert serve_arguments(hosts, launch, 1)[-1] == "--headless"
    given = ClusterLaunch(model="m", flags=("--master-addr=10.9.9.9",))
    assert serve_arguments(hosts, given, 1).count("--master-addr") == 0
    one = read_hosts(written(tmp_path, "hosts: [{host: a}]"))
    assert serve_arguments(one, launch, 0) == ("a b; c", "--port=8001")


def test_the_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, PAIR))
    key = own_key(hosts)
    assert len(key) == 64 and stat.S_IMODE((tmp_path / "hosts.key").stat().st_mode) == 0o600
    assert own_key(hosts) == key
    (tmp_path / "hosts.key").chmod(0o644)
    with refuses(ConfigError, "open-cluster-key", "hosts.key"):
        own_key(hosts)
    assert own_key(read_hosts(written(tmp_path, "hosts: [{host: a}]"))) == ""


SECRETS = {"VLLM_API_KEY": "sk-client", "OTHER": "unseen"}


def test_a_dry_run_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no key, and every line but comments is a command that a shell reads as it is meant."""
    monkeypatch.setenv("VLLM_API_KEY", "sk-client")
    text = PAIR + "model: a b;c\nserve: {tensor-parallel-size: 2, port: 8001}\nvariables: [VLLM_API_KEY]\n"
    status, out, err = weft("cluster", "up", written(tmp_path, text), "--dry-run")
    assert (status, err) == (0, "") and not (tmp_path / "hosts.key").exists()
    assert "sk-client" not in out and "VLLM_API_KEY=..." in out
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert [words[0] for words in commands] == ["ssh", "VLLM_API_KEY=...", "ssh", "VLLM_API_KEY=..."]
    assert commands[3][1:7] == ["CUDA_VISIBLE_DEVICES=3,1", "~/w e/python", "-P", "-m", "weft", "serve"]
    assert commands[3][7:10] == ["a b;c", "--tensor-parallel-size=2", "--port=8001"]
    assert commands[3][-3:] == ["--headless", "--cluster-key-file", "KEYFILE"]


def test_secrets_go_to_standard_input_only(tmp_path: Path) -> None:
    hosts = read_hosts(written(tmp_path, PAIR + "model: m\nvariables: [VLLM_API_KEY]\n"))
    launch = create_launch(hosts, "", "hosts.yaml", SECRETS)
    assert launch.variables == {"VLLM_API_KEY": "sk-client"}
    for node in remote.nodes_of(hosts):
        task = start_task(hosts, launch, node, "k" * 64)
        assert task.environment["VLLM_API_KEY"] == "sk-client" and "OTHER" not in task.environment
        seen = " ".join([*node.command(), *task.argv])
        assert "sk-client" not in seen and "kkk" not in seen


def test_a_pull_has_what_the_servers_have(tmp_path: Path) -> None:
    text = PAIR + "model: m\nserve: {download-dir: /data, tensor-parallel-size: 2}\nvariables: [VLLM_API_KEY]\n"
    hosts = read_hosts(written(tmp_path, text))
    pull = create_pull(hosts, "m", "hosts.yaml", SECRETS)
    assert pull == ClusterLaunch(model="m", flags=("--download-dir=/data",), variables={"VLLM_API_KEY": "sk-client"})
    with refuses(ConfigError, "variable-not-set", "VLLM_API_KEY"):
        create_pull(hosts, "m", "hosts.yaml", {})


def test_another_engine_under_the_name_is_no_success() -> None:
    other = Started(7, "/log", True, False, 0.0)
    with refuses(remote.RemoteError, "other-engine", "node 0 (a)", "process 7", "/log", "weft cluster down"):
        remote._await_ready(iter([(SshNode(0, Machine(host="a")), other)]), print, 1)


WRONG_LAUNCHES = [
    "hosts: [{host: a}]",
    "hosts: [{host: a}]\nmodel: m\nserve: {nnodes: 2}",
    "hosts: [{host: a}]\nmodel: m\nserve: {api-key: sk-1}",
    "hosts: [{host: a}]\nmodel: m\nserve: {hf_token: x}",
    "hosts: [{host: a}]\nmodel: m\nserve: {tensor-paralel-size: 2}",
    "hosts: [{host: a}]\nmodel: m\nserve: {tensor-parallel-size: 0}",
    "hosts: [{host: a}, {host: b}]\nmodel: m\nserve: {distributed-executor-backend: ray}",
    "hosts: [{host: a}]\nmodel: m\nvariables: [NOT_SET_ANYWHERE]",
]


def test_launches_that_are_refused(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    def launch(text: str) -> object:
        return create_launch(read_hosts(written(tmp_path, text)), "", "hosts.yaml", {})

    golden("errors/launches.txt", refusals(launch, WRONG_LAUNCHES, tmp_path))


def test_words_that_the_commands_do_not_take(golden: Callable[[str, str], None]) -> None:
    cases = ["cluster up", "cluster down a b", "cluster pull a b", "cluster cert", "cluster cert a --nodes 2"]
    codes = ["hosts-missing"] * 3 + ["nodes-missing"] * 2
    golden("errors/cluster.txt", "".join(map(lambda words, code: refused_line(words, 2, code), cases, codes)))


@pytest.mark.parametrize(
    ("status", "line", "values"),
    [
        (255, "me@b: Permission denied (publickey).", ["ssh-copy-id -p 2222 me@b"]),
        (255, "Host key verification failed.", ["ssh -p 2222 me@b"]),
        (255, "ssh: Could not resolve hostname b: Name or service not known", ["check host:"]),
        (255, "ssh: connect to host b port 2222: Connection refused", ["sshd"]),
        (1, "/py: No module named weft", ["/py", "no Weft", "install"]),
        (127, "sh: /py: not found", ["/py does not run"]),
        (1, "something else", ["status 1", "something else"]),
    ],
)
def test_reasons_of_ssh_have_a_way_out(status: int, line: str, values: list[str]) -> None:
    node = SshNode(1, Machine(host="b", user="me", port=2222, python="/py"))
    reason = node.reason(Gone(status, line))
    assert all(value in reason for value in values), reason


def test_without_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.cluster.ssh.shutil", SimpleNamespace(which=lambda _: None))
    with refuses(ConfigError, "no-ssh"):
        remote.bring_down(read_hosts(written(tmp_path, PAIR)), print)


class FakeSsh:
    """A program `ssh` that runs the command on this machine, in a folder of its own for each host."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = folder / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(
            "#!/bin/sh\n"
            "for word; do host=$command; command=$word; done\n"
            f'mkdir -p "{folder}/$host"\n'
            f'echo "$@" >> "{folder}/commands"\n'
            'echo "Welcome to $host"\n'
            '[ "$host" = refused ] && { echo "Permission denied (publickey)." >&2; exit 255; }\n'
            f'XDG_CACHE_HOME="{folder}/$host" exec sh -c "$command"\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{Path('/usr/bin')}:{Path('/bin')}")


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path, monkeypatch)


def here(**fields: Any) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in {**fields, "python": sys.executable}.items()) + "}"


def test_the_doctor_sees_all_nodes(fake_ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(remote.__file__).parents[3]))
    hosts = written(tmp_path, f"hosts: [{here(host='refused')}, {here(host='second')}]")
    status, answer = weft_json("doctor", "--hosts", hosts, "--no-measure")
    assert status == 1 and answer["ok"] is False
    first, *others = answer["checks"]
    assert (first["node"], first["name"], first["status"]) == ("refused", "reachable", "fail")
    assert "Permission denied" in first["value"] and "ssh-copy-id refused" in first["remedy"]
    assert {check["node"] for check in others} == {"second"}
    by_name = {check["name"]: check for check in others}
    assert len(by_name) == len(others)
    assert {by_name[name]["status"] for name in ("reachable", "same-torch", "clock")} == {"ok"}
    assert {"disk", "memory", "open-files"} <= by_name.keys()
    refused_line(["doctor", "--nodes", "--hosts", str(tmp_path / "none.yaml")], 1, "cannot-read-hosts", "none.yaml")


def test_nodes_that_are_not_alike() -> None:
    visits = {
        "away": Check("reachable", "fail", "no route"),
        "a": Visit(Examined((), "2.13.0", 105.0), 100.0, 110.0),
        "b": Visit(Examined((), "2.12.0", 10.0), 100.0, 110.0),
    }
    assert [(check.node, check.name, check.status) for check in node_checks(visits)] == [
        ("away", "reachable", "fail"),
        *(("a", name, "ok") for name in ("reachable", "same-torch", "clock")),
        ("b", "reachable", "ok"),
        *(("b", name, "fail") for name in ("same-torch", "clock")),
    ]
    *_, torch, clock = node_checks(visits)
    has_values(torch.limit, "2.13.0", "a")
    assert "torch==2.13.0" in torch.remedy and "90.0 s" in clock.value


def test_down_goes_on_after_a_node_that_fails(
    fake_ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login shell's own lines do not matter."""
    monkeypatch.setenv("PYTHONPATH", str(Path(remote.__file__).parents[3]))
    hosts = written(tmp_path, f"hosts: [{here(host='refused')}, {here(host='second')}]")
    status, out, err = weft("cluster", "down", hosts)
    assert (status, err) == (1, "")
    first, second = out.splitlines()
    has_values(first, "node 0 (refused): ", "Permission denied", "ssh-copy-id refused")
    assert second == "node 1 (second): nothing runs"
