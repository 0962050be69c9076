"""The cluster key, and the handshake by which both sides of a connection prove that they have it.

The side that connects sends MAGIC and a nonce; the other answers with a nonce of its own and its proof; then the first
sends its proof, and gets a verdict. A proof is an HMAC-SHA256 over the side's name, both nonces and, inside TLS, both
certificates. All parts have a fixed length, and no message is read before the verdict.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weft.errors import ConfigError, error_reason
from weft.regular_files import open_regular

VARIABLE = "WEFT_CLUSTER_KEY"
MIN_KEY_CHARACTERS = 32
KEY_FILE_BYTES = 100_000  # a key, or certificates in PEM; usually some hundred bytes
KEY_MODE = 0o600  # mode of files with a key
MAKE = "(umask 077; openssl rand -hex 32 > cluster.key)"

FAMILY = b"weft/"
MESSAGES = 1  # version of the messages between nodes: raised when one of them changes its meaning
MAGIC = b"%s%d\r\n" % (FAMILY, MESSAGES)
NONCE_BYTES = PROOF_BYTES = 32
ACCEPTED, REFUSED = b"\1", b"\0"
HANDSHAKE_S = 5.0  # seconds for the whole handshake
# Sent in place of MAGIC to a side that has TLS, or has not, as this one, so that it can tell its user.
WANTS_TLS, WANTS_NO_TLS = b"weft/tls", b"weft/key"


class WrongKeyError(Exception):
    """The other side has another key."""


class CertificateError(Exception):
    """The two sides do not trust each other's certificates, or only one has one."""


class NotWeftError(Exception):
    """The other side is no node of Weft, or ended the connection."""


class OtherVersionError(NotWeftError):
    """The other side is a node of Weft with another version of the messages between nodes."""


def load_key(file: str | None, environment: Mapping[str, str], nodes: int) -> bytes:
    """Read the cluster key from a file, or else from the environment.

    Raises ConfigError if there is none, if others may read or own the file, or if the key is short.
    """
    if file is not None:
        text, where = _read_key_file(Path(file).expanduser()), file
    else:
        text, where = environment.get(VARIABLE, "").strip(), VARIABLE
        if not text:
            raise ConfigError(
                f"--nnodes {nodes} needs a cluster key, the same on all nodes; make one with {MAKE}, copy it to the "
                "others, and give --cluster-key-file cluster.key",
                code="no-cluster-key",
            )
    if len(text) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"the cluster key in {where} has {len(text)} characters; it needs {MIN_KEY_CHARACTERS} or more: make one "
            f"with {MAKE}",
            code="short-cluster-key",
        )
    return text.encode()


def make_key() -> str:
    """A new cluster key, as text."""
    return secrets.token_hex(32)


def _read_key_file(path: Path) -> str:
    try:
        text, fault = read_private(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the cluster key {path}: {error_reason(error)}; make one with {MAKE}",
            code="cannot-read-cluster-key",
        ) from None
    if fault:
        raise ConfigError(fault, code="open-cluster-key")
    return text.strip()


def read_private(path: Path) -> tuple[str, str]:
    """Text of a file with a secret, and the fault by which others may know it, "" if there is none.

    The file is opened once: what is checked is what is read. Raises OSError and UnicodeDecodeError.
    """
    with open_regular(path, KEY_FILE_BYTES) as file:
        about = os.fstat(file.fileno())
        mode = stat.S_IMODE(about.st_mode)
        if mode & 0o077:
            return "", f"others than its owner may read or write {path} (mode {mode:04o}); chmod 600 {path}"
        if about.st_uid not in (0, os.geteuid()):
            return "", f"{path} belongs to another user (number {about.st_uid}); chown {os.geteuid()} {path}"
        return file.read().decode(), ""


def prove_to_acceptor(connection: socket.socket, key: bytes, binding: bytes = b"") -> None:
    """Do the handshake on the side that has connected.

    Raises WrongKeyError if the other side has another key, CertificateError if it wants TLS, and NotWeftError for
    anything else than a handshake.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    try:
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + ours)
        magic = _receive(connection, deadline, len(MAGIC))
        if magic == WANTS_TLS:
            raise CertificateError("it has a certificate: give this node --cluster-cert-file as well")
        _check_magic(magic)
        answer = _receive(connection, deadline, NONCE_BYTES + PROOF_BYTES)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"acceptor", ours + theirs + binding)):
            with suppress(OSError):
                connection.sendall(bytes(PROOF_BYTES))  # so that the other side can tell its user
            raise WrongKeyError
        connection.sendall(_proof(key, b"connector", ours + theirs + binding))
        if _receive(connection, deadline, 1) != ACCEPTED:
            raise WrongKeyError
    except OSError as error:
        raise NotWeftError(error_reason(error)) from None
    connection.settimeout(None)


def check_connector(connection: socket.socket, key: bytes, binding: bytes = b"") -> None:
    """Do the handshake on the side that was connected to. Raises as `prove_to_acceptor`."""
    deadline = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    try:
        opening = _receive(connection, deadline, len(MAGIC) + NONCE_BYTES)
        if not opening.startswith(MAGIC) and opening.startswith(FAMILY):
            connection.sendall(MAGIC)  # so that the other side can tell its user too
        _check_magic(opening[: len(MAGIC)])
        theirs, ours = opening[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + ours + _proof(key, b"acceptor", theirs + ours + binding))
        proof = _receive(connection, deadline, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"connector", theirs + ours + binding)):
            with suppress(OSError):  # it may have gone, knowing that already
                connection.sendall(REFUSED)
            raise WrongKeyError
        connection.sendall(ACCEPTED)
    except OSError as error:
        raise NotWeftError(error_reason(error)) from None
    connection.settimeout(None)


def _check_magic(magic: bytes) -> None:
    version = magic.removeprefix(FAMILY).strip()
    if magic.startswith(FAMILY) and version.isdigit() and int(version) != MESSAGES:
        raise OtherVersionError(
            f"it sends version {int(version)} of Weft's messages between nodes, and this node version {MESSAGES}; "
            "install the same Weft on both"
        )
    if magic != MAGIC:
        raise NotWeftError("it does not speak Weft's protocol")


def _proof(key: bytes, side: bytes, content: bytes) -> bytes:
    """The proof of a side. `content` are the connector's nonce, the acceptor's, and the binding of certificates."""
    return hmac.digest(key, b"weft cluster " + side + b"\0" + content, "sha256")


def _receive(connection: socket.socket, deadline: float, size: int) -> bytes:
    """Receive exactly `size` bytes before the deadline of time.monotonic(), in whatever pieces they come."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotWeftError(f"the handshake takes longer than {HANDSHAKE_S:g} s")
        connection.settimeout(left)
        more = connection.recv(size - len(data))
        if not more:
            raise NotWeftError("it closed the connection")
        data += more
    return data
