"""Certificates of the cluster: connections inside TLS from both sides, before the key; one line for every fault."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.commands import weft
from tests.pure.engine.test_nodes import facts, free_port, join, joining_settings
from tests.refusals import refuses
from weft.engine.cluster import certificates
from weft.engine.cluster.certificates import make_certificates
from weft.engine.cluster.join_listener import JoinListener
from weft.engine.cluster.node import connect_to_head
from weft.engine.cluster.speed import PeerListener, measure_network
from weft.engine.processes import tls
from weft.engine.processes.keys import CertificateError, NotWeftError, WrongKeyError
from weft.engine.processes.secure import accept_securely, connect_securely
from weft.engine.processes.tls import bundle_fault, load_certificate
from weft.errors import ConfigError

pytest.importorskip("cryptography", reason="needs the extra weft-llm[tls]")

KEY = b"a" * 32
WAIT_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """node0.pem and node1.pem; other/node0.pem of another authority; old/node0.pem of this one, which has expired."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, 2, 30)
    make_certificates(folder / "other", 1, 30)
    old = folder / "old"
    old.mkdir()
    for name in ("ca.key", "ca.pem"):
        (old / name).write_bytes((folder / name).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "EARLIER", datetime.timedelta(days=3))
        make_certificates(old, 1, -1)
    return folder


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    names = {"first": "node0", "second": "node1", "other": "other/node0", "old": "old/node0"}
    return {"": ""} | {name: (folder / f"{path}.pem").read_text() for name, path in names.items()}


def meet(connector: str, acceptor: str, theirs: bytes = KEY) -> tuple[socket.socket | Exception, ...]:
    """The sockets of both sides in place of a connection, or the error of each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    outcomes: list[socket.socket | Exception] = [OSError(), OSError()]

    def run(side: int, secure: Callable[[socket.socket, bytes, str], socket.socket], key: bytes, text: str) -> None:
        try:
            outcomes[side] = secure(ends[side], key, text)
        except (WrongKeyError, NotWeftError, CertificateError) as error:
            outcomes[side] = error
            ends[side].close()

    thread = threading.Thread(target=run, args=(1, accept_securely, KEY, acceptor))
    thread.start()
    run(0, connect_securely, theirs, connector)
    thread.join(WAIT_S)
    return tuple(outcomes)


def sockets(texts: dict[str, str]) -> tuple[socket.socket, socket.socket]:
    one, other = meet(texts["first"], texts["second"])
    assert isinstance(one, socket.socket) and isinstance(other, socket.socket), (one, other)
    return one, other


def test_bytes_go_both_ways_and_so_does_the_end(texts: dict[str, str]) -> None:
    """More than all buffers hold, in both directions at once."""
    one, other = sockets(texts)
    blob = bytes(range(256)) * 40_000
    received: dict[str, bytes] = {}

    def read(name: str, end: socket.socket) -> None:
        with end.makefile("rb") as stream:
            received[name] = stream.read(len(blob))

    threads = [threading.Thread(target=read, args=pair) for pair in (("one", one), ("other", other))]
    threads += [threading.Thread(target=end.sendall, args=(blob,)) for end in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert received["one"] == received["other"] == blob
    one.sendall(b"last words")
    one.close()
    with other:
        assert other.recv(100, socket.MSG_WAITALL) == b"last words"
        assert other.recv(1) == b""


def test_nothing_but_tls_is_on_the_wire(texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the handshake with the key nor a message is seen."""
    seen: list[bytes] = []
    real = tls.Pump.start

    class Recording(tls.Pump):
        def start(self) -> None:
            write = self._side.outgoing.read

            class Outgoing:
                def read(self) -> bytes:
                    seen.append(write())
                    return seen[-1]

            self._side.outgoing = Outgoing()  # type: ignore[assignment]
            real(self)

    monkeypatch.setattr(tls, "Pump", Recording)
    one, other = sockets(texts)
    one.sendall(b"a prompt that nobody reads")
    assert other.recv(100) == b"a prompt that nobody reads"
    one.close()
    other.close()
    wire = b"".join(seen)
    assert len(wire) > 200 and b"weft/1" not in wire and b"prompt" not in wire


@pytest.mark.parametrize(
    ("connector", "acceptor", "said"),
    [
        ("other", "first", ("another authority", "another authority")),
        ("old", "first", ("has expired", "has expired")),
        ("first", "old", ("has expired", "has expired")),
        ("", "first", ("give this node --cluster-cert-file", "has no certificate")),
        ("first", "", ("has no certificate", "this node has none")),
    ],
)
def test_certificates_that_do_not_fit(
    texts: dict[str, str], connector: str, acceptor: str, said: tuple[str, str]
) -> None:
    """Both sides say why, and nobody gets as far as the key."""
    outcomes = meet(texts[connector], texts[acceptor])
    assert [type(outcome) for outcome in outcomes] == [CertificateError] * 2, outcomes
    assert all(part in str(outcome) for part, outcome in zip(said, outcomes, strict=True)), outcomes


def test_the_key_counts_inside_tls_too(texts: dict[str, str]) -> None:
    assert [type(one) for one in meet(texts["first"], texts["second"], b"b" * 32)] == [WrongKeyError] * 2


def test_somebody_between_two_nodes_is_noticed(texts: dict[str, str], tmp_path: Path, folder: Path) -> None:
    """A stolen certificate is not enough to pass on the proofs of two sides to each other: they name both
    certificates."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        to_thief, thief_in = socket.create_connection(address), listener.accept()[0]
        thief_out, from_thief = socket.create_connection(address), listener.accept()[0]
    outcomes: dict[str, Exception | None] = {}

    def run(name: str, secure: Callable[[socket.socket, bytes, str], socket.socket], end: socket.socket) -> None:
        try:
            secure(end, KEY, texts["first" if name == "connector" else "second"]).close()
        except (WrongKeyError, NotWeftError, CertificateError) as error:
            outcomes[name] = error
            end.close()

    sides = [
        threading.Thread(target=run, args=("connector", connect_securely, to_thief)),
        threading.Thread(target=run, args=("acceptor", accept_securely, from_thief)),
    ]
    for side in sides:
        side.start()
    stolen = texts["second"]
    ends: list[socket.socket] = []
    tapped = threading.Thread(
        target=lambda: ends.append(tls.start_tls(thief_in, stolen, server=True, within_s=5).outer)
    )
    tapped.start()
    outer = tls.start_tls(thief_out, stolen, server=False, within_s=5).outer
    tapped.join(WAIT_S)
    (inner,) = ends
    copies = [threading.Thread(target=copy, args=pair) for pair in ((inner, outer), (outer, inner))]
    for thread in copies + sides:
        thread.start() if thread in copies else thread.join(WAIT_S)
    for thread in copies:
        thread.join(WAIT_S)
    assert isinstance(outcomes["connector"], WrongKeyError), outcomes


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(4096):
            target.sendall(data)
    except OSError:
        pass
    finally:
        source.close()
        target.close()


def test_a_node_joins_and_measures_inside_tls(texts: dict[str, str]) -> None:
    settings = joining_settings(free_port(), certificate=texts["first"])
    with JoinListener(settings) as listener:
        theirs = joining_settings(settings.port, certificate=texts["second"])
        connection = join(theirs, facts(1))
        [[node]] = listener.wait_for([0])
    assert node.facts.node == 1
    node.dismiss("the end", "the-end")
    connection.close()
    listener = PeerListener("127.0.0.1", KEY, texts["first"])
    try:
        speed = measure_network(1, 0, "127.0.0.1", listener.port, KEY, texts["second"])
        assert not speed.problem and speed.bytes_per_s > 0 and speed.round_trip_s > 0
        plain = measure_network(1, 0, "127.0.0.1", listener.port, KEY)
        assert "--cluster-cert-file" in plain.problem
    finally:
        listener.close()


def test_a_head_with_another_authority_is_no_reason_to_wait(texts: dict[str, str]) -> None:
    settings = joining_settings(free_port(), certificate=texts["first"])
    with JoinListener(settings), refuses(ConfigError, "cluster-certificate", settings.head, "another authority"):
        connect_to_head(joining_settings(settings.port, certificate=texts["other"]))


def test_files_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    for name, content in (("open", "x"), ("damaged", "x"), ("old", (folder / "old/node0.pem").read_text())):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o644 if name == "open" else 0o600)
    mixed = (folder / "node0.pem").read_text().partition("-----BEGIN CERT")[0]
    _, mark, rest = (folder / "node1.pem").read_text().partition("-----BEGIN CERT")
    (tmp_path / "mixed").write_text(mixed + mark + rest)
    (tmp_path / "mixed").chmod(0o600)
    with refuses(ConfigError, "cannot-read-cluster-certificate", "none.pem", "weft cluster cert"):
        load_certificate(str(tmp_path / "none.pem"))
    with refuses(ConfigError, "open-cluster-certificate", "0644", "chmod 600"):
        load_certificate(str(tmp_path / "open"))
    for name, said in (("damaged", "no bundle"), ("mixed", "no bundle"), ("old", "has expired")):
        with refuses(ConfigError, "bad-cluster-certificate", name, said, "weft cluster cert"):
            load_certificate(str(tmp_path / name))
    assert load_certificate(None) == "" and bundle_fault(load_certificate(str(folder / "node0.pem"))) == ""


def test_files_of_the_command(tmp_path: Path) -> None:
    """The authority stays the same the second time; nobody else can read a key."""
    status, out, err = weft("cluster", "cert", "--nodes", "2", "--out", str(tmp_path / "c"))
    assert (status, err) == (0, "") and out.splitlines()[:2] == [str(tmp_path / f"c/node{n}.pem") for n in range(2)]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "c").iterdir())
    before = {path.name: path.read_text() for path in (tmp_path / "c").iterdir()}
    (tmp_path / "hosts.yaml").write_text("hosts: [{host: a}, {host: b}, {host: d}]\ncertificates: c\n")
    assert weft("cluster", "cert", str(tmp_path / "hosts.yaml"))[0] == 0
    after = {path.name: path.read_text() for path in (tmp_path / "c").iterdir()}
    assert set(after) - set(before) == {"node2.pem"} and after["ca.key"] == before["ca.key"]
    assert after["node0.pem"] != before["node0.pem"]
    # A certificate of before and one of now trust each other.
    one, other = meet(before["node0.pem"], after["node2.pem"])
    assert isinstance(one, socket.socket) and isinstance(other, socket.socket)
    one.close()
    other.close()


def test_days_end_with_those_of_the_authority(tmp_path: Path) -> None:
    from cryptography import x509

    most = certificates.AUTHORITY_DAYS
    with refuses(ConfigError, "days-beyond-authority", "99999999", most):
        make_certificates(tmp_path, 1, 99999999)
    [bundle] = make_certificates(tmp_path, 1, most)
    own, authority = x509.load_pem_x509_certificates(bundle.read_bytes())
    assert own.not_valid_after_utc == authority.not_valid_after_utc
    (tmp_path / "ca.pem").unlink()
    with refuses(ConfigError, "bad-authority", "ca.pem is missing", "remove ca.key and ca.pem"):
        make_certificates(tmp_path, 1, 1)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with refuses(ConfigError, "no-cryptography", "weft-llm[tls]"):
        make_certificates(tmp_path / "c", 1, 1)


def test_only_tls_1_3(texts: dict[str, str]) -> None:
    side = tls.Side(texts["first"], server=True)
    assert side.tls.context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert side.tls.context.verify_mode == ssl.CERT_REQUIRED
