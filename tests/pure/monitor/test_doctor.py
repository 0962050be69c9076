"""weft doctor: each check on a machine that has its fault, and on one that has not."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tests.pure import machines
from tests.pure.fake_nvml import bridged, eight_h100, two_consumer_cards
from tests.pure.machines_with_gpus import Run
from weft.machine.check import Check
from weft.machine.hardware import listeners
from weft.machine.hardware.listeners import Listener, decode_address
from weft.monitor import gpu_checks, machine_checks, security_checks
from weft.monitor.processes import Process, orphans, own_processes, process_role
from weft.plan import products


def doctor(run: Run, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status, out, _ = run("doctor", "--json", *words)
    answer = json.loads(out)
    assert answer.keys() == {"ok", "checks"} and answer["ok"] == (status == 0)
    checks = {check["name"]: check for check in answer["checks"]}
    assert len(checks) == len(answer["checks"])
    assert all(check.keys() == {"name", "status", "value", "limit", "remedy"} for check in checks.values())
    return status, checks


def test_a_machine_without_gpus(on: Callable[..., Run]) -> None:
    _, checks = doctor(on())
    assert {checks[name]["status"] for name in gpu_checks.GPU_CHECKS} == {"skipped"}
    assert checks["torch"]["status"] == "ok" and checks["memory"]["status"] == "ok"


def test_gpus_with_faults(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "torch_cuda", lambda: "12.8")
    machine = two_consumer_cards()
    machine.cards = [machine.cards[0], dataclasses.replace(machine.cards[1], throttle=0x40, temperature_c=91)]
    status, checks = doctor(on(machine, pair01="nothing happened"))
    assert status == 1 and checks["peer-to-peer"]["status"] == "fail" and "hung" in checks["peer-to-peer"]["value"]
    assert checks["throttling"]["status"] == "warn" and "temperature" in checks["throttling"]["value"]
    assert checks["pcie-lanes"]["status"] == "warn" and "4 of 16" in checks["pcie-lanes"]["value"]
    assert checks["gpu-memory"]["status"] == "warn" and "Planet" in checks["gpu-memory"]["value"]
    assert all(check["remedy"] for check in checks.values() if check["status"] in ("warn", "fail"))


def test_kernels_of_quantised_weights(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor names what is there, and what may help a card; no figure is promised."""
    host = machines.host(1)
    found = gpu_checks.check_products(host)
    assert found.status == "ok" and "not installed" in found.value and "sm_90" in found.remedy
    assert "weft-llm[humming]" in found.remedy and "may gain" in found.remedy and "%" not in found.remedy
    with_it = gpu_checks.check_products(machines.host(1, packages={"humming-kernels": products.VERSION}))
    assert products.VERSION in with_it.value and with_it.remedy == "--product-backend humming takes it"
    other = gpu_checks.check_products(machines.host(1, packages={"humming-kernels": "9.9"}))
    assert "9.9" in other.value and "weft-llm[humming]" in other.remedy and other.limit == products.VERSION
    turing = machines.host((machines.gpu(0, capability=(7, 5)), machines.gpu(1, capability=(9, 0))))
    assert "sm_75, sm_90" in gpu_checks.check_products(turing).remedy
    volta = machines.host((machines.gpu(0, capability=(7, 0)),))
    assert gpu_checks.check_products(volta).remedy == ""


def test_gpus_without_faults(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "torch_cuda", lambda: "12.8")
    _, checks = doctor(on(eight_h100()))
    healthy = ("driver", "cuda", "peer-to-peer", "throttling", "pcie-lanes", "gpu-memory")
    assert {checks[name]["status"] for name in healthy} == {"ok"}
    run = on(bridged((0, 1)))
    assert doctor(run, "--no-measure")[1]["peer-to-peer"]["status"] == "warn"
    assert doctor(run)[1]["peer-to-peer"]["status"] == "ok"
    assert doctor(run, "--no-measure")[1]["peer-to-peer"]["status"] == "ok", "measured by the command before"


@pytest.mark.parametrize(
    ("built", "supported", "status"),
    [
        ("12.8", "12.4", "ok"),
        ("13.0", "12.8", "fail"),
        ("", "12.8", "fail"),
        (None, "12.8", "fail"),
        ("12.8", None, "warn"),
    ],
)
def test_cuda(built: str | None, supported: str | None, status: str) -> None:
    assert gpu_checks.check_cuda(built, supported).status == status


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ""),
        ("git_version = 'cuda'\n", None),
    ],
)
def test_cuda_of_the_installed_torch(
    lines: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(lines)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpu_checks, "find_spec", lambda _: spec)
    assert gpu_checks.torch_cuda() == version


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (lambda: machine_checks.check_open_files(1024), "warn"),
        (lambda: machine_checks.check_open_files(4096), "ok"),
        (lambda: machine_checks.check_open_files(resource.RLIM_INFINITY), "ok"),
        (lambda: machine_checks.check_interfaces(["lo", "docker0"]), "warn"),
        (lambda: machine_checks.check_interfaces(["lo", "eth0"]), "ok"),
        (lambda: machine_checks.check_port(8000, "nginx (process 4)"), "warn"),
        (lambda: machine_checks.check_port(8000, None), "ok"),
        (lambda: machine_checks.check_shared_memory(Path("/nowhere")), "skipped"),
    ],
)
def test_limits_of_the_machine(check: Callable[[], Check], status: str) -> None:
    found = check()
    assert found.status == status and bool(found.remedy) == (status == "warn")


def test_memory_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (tmp_path / "sys/fs/cgroup/box").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/box/memory.max").write_text("max\n")
    assert machine_checks.check_control_group(tmp_path).status == "skipped"
    (tmp_path / "sys/fs/cgroup/box/memory.max").write_text("2000000000\n")
    assert "2.0 GB" in machine_checks.check_control_group(tmp_path).value


# --- processes ---


@pytest.mark.parametrize(
    ("words", "role"),
    [
        ("weft serve demo", "serve"),
        ("/usr/bin/python3 /usr/local/bin/weft gateway --upstream X", "gateway"),
        ("python -m weft serve demo", "serve"),
        ("python -P -m weft.engine.processes.fork_server 3 4", "rank"),
        ("weft plan demo", "other"),
        ("vim -m", "other"),
        ("grep weft serve", "other"),
    ],
)
def test_roles(words: str, role: str) -> None:
    assert process_role(words.split()) == role


def process(pid: int, parent: int, words: str) -> Process:
    return Process(pid=pid, parent=parent, command=tuple(words.split()), role=process_role(words.split()))


def test_orphans() -> None:
    rank = "python -P -m weft.engine.processes.fork_server"
    family = [process(1, 0, "/sbin/init"), process(7, 1, "weft serve demo"), process(8, 7, rank), process(9, 1, rank)]
    assert [left.pid for left in orphans(family)] == [9]
    assert machine_checks.check_orphans(family).status == "fail"
    # The engine is the first process of a container.
    assert orphans([process(1, 0, "weft serve demo"), process(8, 1, rank)]) == []
    assert orphans([process(1, 0, "python mine.py"), process(8, 1, rank)]) == []


def test_own_processes_hold_this_one() -> None:
    (own,) = (process for process in own_processes() if process.pid == os.getpid())
    assert own.parent == os.getppid() and Path(own.command[0]).name.startswith(Path(sys.executable).name[:6])


# --- listeners and security ---


def test_listeners_and_their_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert [entry.address for entry in listeners.listeners() if entry.port == port] == ["127.0.0.1"]
        assert f"(process {os.getpid()})" in str(listeners.port_holder(port))
    assert listeners.port_holder(port) is None


@pytest.mark.skipif(sys.byteorder != "little", reason="addresses as a little-endian kernel prints them")
@pytest.mark.parametrize(
    ("digits", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("00000000", "0.0.0.0"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
        ("00000000000000000000000001000000", "::1"),
    ],
)
def test_addresses(digits: str, address: str) -> None:
    assert decode_address(digits) == address


@pytest.mark.parametrize(
    ("words", "address", "variables", "status"),
    [
        ("weft serve demo", "127.0.0.1", {}, "ok"),
        ("weft serve demo", "0.0.0.0", {}, "fail"),
        ("weft serve demo --api-key k", "0.0.0.0", {}, "warn"),
        ("weft serve demo", "::", {"VLLM_API_KEY": "k"}, "warn"),
        ("weft serve demo --ssl-certfile c --api-key=k", "10.0.0.1", {}, "ok"),
    ],
)
def test_endpoints(words: str, address: str, variables: dict[str, str], status: str) -> None:
    listener = Listener(address=address, port=8000, inode="1")
    check = security_checks.check_endpoint(process(7, 1, words), listener, variables)
    assert check.status == status and bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("text", "status"),
    [("upstreams: []", "fail"), ("keys: k.yaml", "warn"), ("keys: k\nssl_certfile: c", "ok"), ("- 1", "fail")],
)
def test_a_config_file_may_hold_keys_and_tls(text: str, status: str, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(text)
    gateway = process(os.getpid(), 1, f"weft gateway --config {tmp_path / 'gateway.yaml'}")
    listener = Listener(address="0.0.0.0", port=8000, inode="1")
    assert security_checks.check_endpoint(gateway, listener, {}).status == status


def test_keys_in_arguments_and_files_of_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("")
    keys.chmod(0o644)
    found = list(security_checks.check_arguments(process(7, 1, f"weft serve demo --api_key k --api-key-file={keys}")))
    assert [check.status for check in found] == ["warn", "warn"] and f"chmod 600 {keys}" in found[1].remedy
    keys.chmod(0o600)
    assert security_checks.check_private(keys, "keys").status == "ok"


def test_a_server_of_ours_is_found(tmp_path: Path) -> None:
    """This process plays a server that listens on all addresses."""
    with socket.create_server(("", 0)) as server:
        me = Process(pid=os.getpid(), parent=1, command=("weft", "serve"), role="serve")
        found = {check.name: check for check in security_checks.check_security([me])}
        assert found[f"endpoint-{server.getsockname()[1]}"].status == "fail"
