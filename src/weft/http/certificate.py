"""Validity of the server's own certificate."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from contextlib import suppress

from weft.regular_files import open_regular

log = logging.getLogger("weft.serving")

RENEW_S = 2.0  # seconds between two checks of the files
PEM_BYTES = 1_000_000  # a chain of certificates or a key, usually some KB
# Codes of OpenSSL's verification.
FAULTS = {9: "is not valid yet", 10: "has expired"}


def validity_fault(certfile: str, keyfile: str | None) -> str:
    """Fault in the dates of a certificate; "" if there is none.

    A client that trusts exactly this certificate does a TLS handshake in memory with a server that has it: Python's ssl
    reads the dates of a certificate only for a connection. Raises OSError for files that cannot be used.
    """
    for path in (certfile, keyfile or certfile):
        open_regular(path, PEM_BYTES).close()  # OpenSSL would wait for the writer of a pipe
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(certfile, keyfile)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(certfile)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # flights of a handshake
        for end in (client, server):
            try:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            except ssl.SSLCertVerificationError as error:
                return FAULTS.get(error.verify_code, "")
            except ssl.SSLError:  # the other end has refused
                return ""
    return ""


class CertificateFiles:
    """A certificate and its key on disk, which may be replaced while the server runs."""

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        self._certfile, self._keyfile = certfile, keyfile
        self._stamp = self._read_stamp()

    def reload(self, context: ssl.SSLContext) -> bool:
        """Use changed files for new connections; open connections go on. Returns True if the files have changed.

        Raises ValueError, once for each change, for files that cannot be used: the old files stay in use.
        """
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            fault = validity_fault(self._certfile, self._keyfile)
            if fault:
                raise ValueError(f"the certificate {self._certfile} {fault}")
            context.load_cert_chain(self._certfile, self._keyfile)
        except OSError as error:
            raise ValueError(f"the certificate {self._certfile} cannot be used: {error}") from None
        return True

    def renew(self, context: ssl.SSLContext) -> None:
        """`reload`, with a line in the log for files that have changed."""
        try:
            if self.reload(context):
                log.info("a new certificate is in use")
        except ValueError as error:
            log.error("the old certificate stays in use: %s", error)

    async def renew_forever(self, context: ssl.SSLContext) -> None:
        """Check for changed files periodically."""
        while True:
            await asyncio.sleep(RENEW_S)
            self.renew(context)

    def _read_stamp(self) -> list[tuple[int, int]]:
        stamps = []
        for path in (self._certfile, self._keyfile or self._certfile):
            try:
                status = os.stat(path)
                stamps.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                stamps.append((0, 0))
        return stamps
