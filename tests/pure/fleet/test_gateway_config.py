"""The configuration of a gateway: flags, YAML files, and one line for each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.log_events import logged
from tests.refusals import refuses
from weft.cli.commands import COMMANDS
from weft.cli.parser import parse_command
from weft.cli.serve import gateway as gateway_command
from weft.errors import ConfigError
from weft.fleet.gateway.server import check_hosts, connection_limits, create_proxy, run_gateway
from weft.fleet.upstreams.config import GatewayConfig, Timeouts, UpstreamConfig, make_config, parse_url, read_config
from weft.http import listen
from weft.http.admission import ConnectionLimits
from weft.http.key_file import read_keys
from weft.http.options import ServeOptions

A = "http://127.0.0.1:8001"
FILE = f"""
policy: prefix
port: 9000
upstreams:
  - url: {A}
    weight: 2
    models: [a, b]
  - url: http://127.0.0.1:8002/v1/
    models: {{a: other}}
timeouts: {{idle: 30}}
"""


def test_a_file_and_flags_over_it(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(FILE)
    config = read_config(str(path), {"port": 9001, "policy": "round-robin"})
    assert config == GatewayConfig(
        policy="round_robin",
        port=9001,
        upstreams=[
            UpstreamConfig(url=A, weight=2, models=["a", "b"]),
            UpstreamConfig(url="http://127.0.0.1:8002/v1/", models={"a": "other"}),
        ],
        timeouts=Timeouts(idle=30),
    )
    assert [upstream.aliases for upstream in config.upstreams] == [{"a": "a", "b": "b"}, {"a": "other"}]


def test_the_command_s_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(FILE)
    ran: list[tuple[Any, ...]] = []
    monkeypatch.setattr("weft.fleet.gateway.server.run_gateway", lambda *given: ran.append(given))
    monkeypatch.setenv("WEFT_ADMIN_KEY", "secret")
    words = [
        ["--upstream", A, "--upstream", "127.0.0.1:8002", "--policy", "least-connections"],
        ["--config", str(path)],
    ]
    for given in words:
        arguments = parse_command(COMMANDS["gateway"], given)
        assert gateway_command.main(arguments) == 0
    flags, file = (config for config, *_ in ran)
    assert [upstream.url for upstream in flags.upstreams] == [A, "127.0.0.1:8002"] and flags.policy == "least_conn"
    assert file.policy == "prefix" and file.port == 9000
    assert ran[0][1:] == ("secret", 30.0)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("http://a:1", "http://a:1"),
        ("a:1/", "http://a:1"),
        ("https://api.example.com/v1", "https://api.example.com:443"),
        ("http://a/base/v1/", "http://a:80/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_urls(url: str, parsed: str) -> None:
    assert str(parse_url(url)) == parsed


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://u:p@a", "http://a?b", "http://[::"]
)
def test_urls_that_are_none(url: str) -> None:
    with refuses(ConfigError, "invalid-upstream"):
        parse_url(url)


@pytest.mark.parametrize(
    ("values", "code", "shown"),
    [
        ({}, "no-upstream", ("--upstream",)),
        ({"upstreams": [{"url": A}], "policy": "fastest"}, "unknown-policy", ("fastest", "least_conn")),
        ({"upstreams": [{"url": A}], "polcy": "random"}, "unknown-field", ("polcy", "policy")),
        ({"upstreams": [{"url": A, "wight": 1}]}, "unknown-field", ("wight", "weight")),
        ({"upstreams": [{"url": A}, {"url": "127.0.0.1:8001/v1"}]}, "duplicate-upstream", ("127.0.0.1:8001/v1",)),
        ({"upstreams": [{"url": A, "weight": 0}]}, "invalid-weight", (A, "0")),
        ({"upstreams": [{"url": A, "weight": float("nan")}]}, "invalid-weight", ()),
        ({"upstreams": [{"url": A, "weight": "x"}]}, "invalid-field", ("weight",)),
        ({"upstreams": [{"url": A, "models": "a"}]}, "invalid-field", ("models",)),
        ({"upstreams": [{}]}, "invalid-field", ("url",)),
        ({"upstreams": A}, "invalid-field", ("upstreams",)),
        ({"upstreams": [{"url": A, "key_env": "NO_SUCH_KEY"}]}, "upstream-key-unset", (A, "NO_SUCH_KEY")),
        ({"upstreams": [{"url": A, "key_file": "/no/such"}]}, "upstream-key-unreadable", ("/no/such",)),
        ({"upstreams": [{"url": A}], "timeouts": {"idle": -1}}, "invalid-field", ("idle",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults(values: dict[str, Any], code: str, shown: tuple[str, ...]) -> None:
    with refuses(ConfigError, code, *shown):
        make_config(values)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("upstreams: [", "config-not-yaml"),
        ("- a", "config-not-mapping"),
        ("", "no-upstream"),
        ("\0", "config-not-yaml"),
    ],
)
def test_faulty_files(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with refuses(ConfigError, code):
        read_config(str(path), {})


def test_files_that_are_not_there() -> None:
    with refuses(ConfigError, "cannot-read-config", "/no/such"):
        read_config("/no/such", {})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[{name: a}]", "invalid-field"),
        ("[{name: a, key: x, sha256: y}]", "invalid-field"),
        ("[{name: a, sha256: abc}]", "invalid-field"),
        ("[{name: a, key: x}, {name: a, key: y}]", "duplicate-key-name"),
        ("[{name: a, key: x, admn: true}]", "unknown-field"),
        ("[]", "no-keys"),
    ],
)
def test_faulty_keys(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    with refuses(ConfigError, code):
        read_keys(str(path))


def test_the_key_of_an_upstream_is_no_part_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_KEY", "sec\nret")
    with refuses(ConfigError, "upstream-key-unusable") as refused:
        make_config({"upstreams": [{"url": A, "key_env": "BAD_KEY"}]})
    assert "ret" not in str(refused.value).replace("secret", "")


def test_hosts_that_nobody_knows_and_the_gateway_itself() -> None:
    with refuses(ConfigError, "unknown-host", "no.such.host.invalid"):
        check_hosts([UpstreamConfig(url="http://no.such.host.invalid:1")], ("127.0.0.1", 8080))
    for host in ("127.0.0.1", "0.0.0.0"):
        with refuses(ConfigError, "upstream-is-gateway", "8080"):
            check_hosts([UpstreamConfig(url="http://localhost:8080")], (host, 8080))
    with refuses(ConfigError, "upstream-is-gateway", "[::1]:8080"):  # at which a gateway on 127.0.0.1 listens too
        check_hosts([UpstreamConfig(url="http://[::1]:8080")], ("127.0.0.1", 8080))
    check_hosts([UpstreamConfig(url="http://[::1]:8080")], ("192.0.2.1", 8080))
    check_hosts([UpstreamConfig(url="http://localhost:8081")], ("127.0.0.1", 8080))


def test_two_gateways_on_one_port() -> None:
    with listen.bind(ServeOptions(port=0)) as taken:
        port = taken.getsockname()[1]
        with refuses(ConfigError, "port-taken", port):
            run_gateway(make_config({"upstreams": [{"url": A}], "port": port}), None, 1.0)


def test_too_few_open_files_are_told_with_the_number_that_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    limits = connection_limits(1000, 160)
    (row,) = logged(caplog, "few-files")
    assert row["connections"] == limits.connections < 160 / 2 and row["files"] == 160
    caplog.clear()
    assert connection_limits(1000, row["needed"]).connections == ConnectionLimits().connections
    assert connection_limits(1000, row["needed"] - 2).connections < ConnectionLimits().connections
    assert len(logged(caplog, "few-files")) == 1


async def test_an_access_log_that_cannot_be_written() -> None:
    with refuses(ConfigError, "cannot-write-access-log", "/no/such"):
        create_proxy(make_config({"upstreams": [{"url": A}], "access_log": "/no/such/log"}), None)
