"""Exchange: one client's request, as it goes to replicas, and what the access log says of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from starlette.types import Scope

from weft.gateway.answer import ResumableAnswer, WholeAnswer
from weft.gateway.completion import COUNTED, Completion
from weft.gateway.keys import ANONYMOUS
from weft.gateway.ledger import Reservation
from weft.gateway.policy import Fingerprint
from weft.gateway.replica import Attempt, Replica
from weft.gateway.upstream import UpstreamError
from weft.serving.errors import HttpError
from weft.serving.front_client import HEADER

OWNER_HEADER = b"x-weft-owner"  # whose files and batches a request is about
HOP_HEADER = b"x-weft-gateway"  # names of the gateways that a request came through
CLIENT_HEADER = HEADER.encode()  # whose request the front of a set sends on

# RFC 9110: about one connection, not about the message. The others are written anew for each upstream.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
FORWARDED_FOR = b"x-forwarded-for"
WRITTEN_ANEW = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    FORWARDED_FOR,
    b"x-forwarded-proto",
    HOP_HEADER,
    OWNER_HEADER,
    CLIENT_HEADER,
}
KEYS = frozenset((b"authorization", b"x-api-key", OWNER_HEADER))  # headers with keys that may be the upstream's
NOT_SENT = WRITTEN_ANEW | KEYS
NOT_SENT_TO_COUNTED = NOT_SENT | {b"accept-encoding"}  # the gateway reads the answers of these paths
OPTIONS_OF_CONNECTION = (b"keep-alive", b"close")  # which name no header field

LOGGED_CHARACTERS = 512  # characters of a path

UNREAD = Fingerprint()

Headers = list[tuple[bytes, bytes]]


class ClientGoneError(UpstreamError):
    """The client has closed its connection."""


class Exchange:
    """One request of a client, from its head on.

    `model`, `fingerprint`: what routing reads. `completion`: what it asks for, if that is a completion. `answer`: its
    stream, if the gateway reads that. `tried`: replicas that do not get it again. `lost_at`: those of them that died or
    stalled with it, since its answer last grew. `attempt`: the try that runs. `refusal`: the answer if no replica gives
    a better one, of a replica that is full. `gone`: the client has closed its connection. `hops`: names of the gateways
    before this one. `announced`: length of the body by its head, 0 if that tells none. `metered`: the tokens of the
    answer count. The other fields are for the access log: `outcome` is "complete" or the code of an error.
    """

    # Most requests leave most of these as they are.
    body = b""
    client = ANONYMOUS
    bytes_in = announced = 0
    model = ""
    fingerprint = UNREAD
    completion: Completion | None = None
    metered = False
    entered = False  # counted by the rates of its key
    owner = b""  # of files and batches: the client, as upstreams know it
    client_header = b""  # the client, as the front of a set tells a model's server
    attempt: Attempt | None = None
    tries = 0
    refusal: HttpError | None = None
    answer: ResumableAnswer | WholeAnswer | None = None
    reservation: Reservation | None = None
    reserved_at: Replica | None = None
    gone = False
    status = bytes_out = 0
    first_byte_s = 0.0
    outcome = "internal-error"  # unless something else is noted
    _digest = b""

    def __init__(self, scope: Scope, gateway: bytes) -> None:
        self.scope = scope
        self.method: bytes = scope["method"].encode()
        self.raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        self.tried: list[Replica] = []
        self.lost_at: list[Replica] = []
        self.hops: list[bytes] = []
        self.began_s = time.monotonic()
        self._read_headers(gateway)

    def head(self, replica: Replica, length: int) -> bytes:
        """Request line and header fields for a replica, and a body of `length` bytes."""
        scope = self.scope
        target = replica.path + self.raw_path
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (self.method, target, replica.authority), self._common]
        if length or self.method in (b"POST", b"PUT", b"PATCH"):
            lines.append(b"content-length: %d\r\n" % length)
        if replica.key is not None:
            lines.append(b"authorization: Bearer %b\r\n" % replica.key.encode())
        elif not self.client.known:  # the gateway has no keys of its own: these are the upstream's
            lines.append(self._keys)
        if self.owner:
            lines.append(b"%b: %b\r\n" % (OWNER_HEADER, self.owner))
        if self.client_header:
            lines.append(b"%b: %b\r\n" % (CLIENT_HEADER, self.client_header))
        return b"".join([*lines, b"\r\n"])

    def _read_headers(self, gateway: bytes) -> None:
        """Write the header fields that are the same for all replicas, and note those that are about the way here."""
        scope = self.scope
        not_sent = NOT_SENT_TO_COUNTED if scope["path"] in COUNTED else NOT_SENT
        sent: list[bytes] = []
        kept_back = []
        for name, value in scope["headers"]:
            if name in not_sent:
                kept_back.append((name, value))
            else:
                sent += (name, b": ", value, b"\r\n")
        forwarded: list[bytes] = []
        keys: list[bytes] = []
        for name, value in kept_back:
            if name == b"content-length":
                self.announced = int(value) if value.isdigit() else 0
            elif name in KEYS:
                keys += (name, b": ", value, b"\r\n")
            elif name == HOP_HEADER:
                self.hops.append(value)
            elif name == FORWARDED_FOR:
                forwarded.append(value)
            elif name == b"connection" and value.lower() not in OPTIONS_OF_CONNECTION:
                sent = [b"%b: %b\r\n" % pair for pair in without(scope["headers"], not_sent)]
        peer = scope.get("client")
        if peer:
            forwarded.append(peer[0].encode())
        sent.append(
            b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\n%b: %b\r\n"
            % (b", ".join(forwarded), scope["scheme"].encode(), HOP_HEADER, b", ".join([*self.hops, gateway]))
        )
        self._common, self._keys = b"".join(sent), b"".join(keys)

    def begin_attempt(self, replica: Replica) -> Attempt:
        """Note the next try."""
        self.tried.append(replica)
        self.tries += 1
        self.attempt = Attempt(replica, tokens=self.prompt_tokens)
        return self.attempt

    @property
    def digest(self) -> bytes:
        """Digest of what the request asks for, computed while its body is held; empty if it has none."""
        if not self._digest and self.body:
            digest = blake2b(self.raw_path, digest_size=16)
            digest.update(self.body)
            self._digest = digest.digest()
        return self._digest

    @property
    def prompt_tokens(self) -> int:
        """Likely number of tokens of the prompt: English text and its JSON have about 4 bytes per token."""
        return self.bytes_in // 4

    @property
    def upstream(self) -> str:
        """Name of the last replica; "" if there was none."""
        return self.attempt.replica.name if self.attempt is not None else ""

    def leave(self) -> None:
        """Cancel what runs: the client has gone."""
        self.gone = True
        if self.attempt is not None:
            self.attempt.cancel(client_gone())

    def log_row(self) -> dict[str, Any]:
        """The line of the access log: no prompt, no answer, no key."""
        now = time.monotonic()
        peer = self.scope.get("client")
        return {
            "time": round(time.time(), 3),
            "client": peer[0] if peer else None,
            "key": self.client.name,
            "method": self.scope["method"],
            "path": self.scope["path"][:LOGGED_CHARACTERS],
            "model": self.model or None,
            "upstream": self.upstream or None,
            "tries": self.tries,
            "status": self.status,
            "outcome": self.outcome,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "first_byte_s": round(self.first_byte_s - self.began_s, 4) if self.first_byte_s else None,
            "total_s": round(now - self.began_s, 4),
        }


def client_gone() -> ClientGoneError:
    return ClientGoneError("the client has closed its connection", code="client-gone")


def without(headers: Sequence[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    """The header fields whose names are not in `dropped`, nor named by a Connection field."""
    kept = []
    for pair in headers:
        if pair[0] not in dropped:
            kept.append(pair)
        elif pair[0] == b"connection" and pair[1].lower() not in OPTIONS_OF_CONNECTION:
            named = frozenset(part.strip().lower() for part in pair[1].split(b","))
            if not named <= dropped:
                return without(headers, dropped | named)
    return kept
