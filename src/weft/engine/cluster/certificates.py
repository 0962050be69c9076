"""The cluster's own certificate authority, and a certificate for each node (`weft cluster cert`).

A node's bundle is one file in PEM: its private key, its certificate, and the authority's.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.cache import make_private
from weft.engine.cluster.agent import write_private
from weft.errors import ConfigError, error_reason
from weft.formatting import extra_hint
from weft.regular_files import read_regular

PEM_BYTES = 100_000  # a key or a certificate, usually some KB
AUTHORITY_DAYS = 3650
EARLIER = datetime.timedelta(minutes=5)  # clocks of nodes differ


def make_certificates(folder: Path, nodes: int, days: int) -> list[Path]:
    """Write a bundle for each node, by the authority in the folder, which is made if there is none; return the paths.

    Files that exist are replaced, the authority's are not. Raises ConfigError.
    """
    x509 = _cryptography()
    try:
        make_private(folder)
        authority = _authority(x509, folder)
        _check_days(authority[0], folder, days)
        paths = [folder / f"node{node}.pem" for node in range(nodes)]
        for node, path in enumerate(paths):
            _replace_private(path, _bundle(x509, f"weft node {node}", authority, days))
    except OSError as error:
        raise ConfigError(
            f"cannot write certificates to {folder}: {error_reason(error)}; give another directory with --out",
            code="cannot-write-certificates",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the authority in {folder} cannot be used: {error}; remove ca.key and ca.pem there for a new one, which "
            "all nodes need then",
            code="bad-authority",
        ) from None
    return paths


def _cryptography() -> Any:
    try:
        from cryptography import x509
    except ImportError:
        raise ConfigError(
            f"weft cluster cert needs the package cryptography: {extra_hint('tls')}", code="no-cryptography"
        ) from None
    return x509


def _authority(x509: Any, folder: Path) -> tuple[Any, Any]:
    """The authority's certificate and private key. Raises OSError and ValueError."""
    from cryptography.hazmat.primitives import serialization

    key_file, file = folder / "ca.key", folder / "ca.pem"
    if key_file.exists() != file.exists():
        raise ValueError(f"{(file if key_file.exists() else key_file).name} is missing")
    if key_file.exists():
        key = serialization.load_pem_private_key(read_regular(key_file, PEM_BYTES), None)
        return x509.load_pem_x509_certificate(read_regular(file, PEM_BYTES)), key
    key = _new_key()
    certificate = _certificate(x509, "weft cluster authority", key, None, AUTHORITY_DAYS)
    write_private(key_file, _key_text(key))
    _replace_private(file, _text(certificate))
    return certificate, key


def _check_days(authority: Any, folder: Path, days: int) -> None:
    """Raise ConfigError for days beyond the end of the authority, with which certificates end."""
    left = authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    most = math.ceil(left / datetime.timedelta(days=1))
    if days > most:
        raise ConfigError(
            f"--days is {days}, and the authority in {folder} is valid for {max(0, most)} days; give fewer, or remove "
            "ca.key and ca.pem there for a new one, which all nodes need then",
            code="days-beyond-authority",
        )


def _bundle(x509: Any, name: str, authority: tuple[Any, Any], days: int) -> str:
    key = _new_key()
    certificate = _certificate(x509, name, key, authority, days)
    return _key_text(key) + _text(certificate) + _text(authority[0])


def _certificate(x509: Any, name: str, key: Any, authority: tuple[Any, Any] | None, days: int) -> Any:
    """A certificate for a key, signed by the authority; without one, by itself as an authority."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signing_key = (authority[0].subject, authority[1]) if authority else (subject, key)
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    if authority:
        end = min(end, authority[0].not_valid_after_utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None if authority else 0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .add_extension(_usage(x509, signs=authority is None), critical=True)
    )
    if authority:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(signing_key, hashes.SHA256())


def _usage(x509: Any, *, signs: bool) -> Any:
    names: Sequence[str] = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    used = ("key_cert_sign", "crl_sign") if signs else ("digital_signature",)
    return x509.KeyUsage(**{name: name in used for name in names})


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_text(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text.decode()


def _text(certificate: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    text: bytes = certificate.public_bytes(Encoding.PEM)
    return text.decode()


def _replace_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, whole or not at all."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    write_private(part, text)
    os.replace(part, path)
