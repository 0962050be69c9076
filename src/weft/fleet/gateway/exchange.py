"""Exchange: one client's request, its tries at replicas, and its line of the access log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from starlette.types import Scope

from weft.fleet.accounts.keys import ANONYMOUS
from weft.fleet.accounts.ledger import Reservation
from weft.fleet.gateway.answer import ResumableAnswer, WholeAnswer
from weft.fleet.gateway.completion import COUNTED, ForwardedCompletion
from weft.fleet.upstreams.policy import Fingerprint
from weft.fleet.upstreams.replica import Attempt, UpstreamReplica
from weft.fleet.upstreams.upstream import UpstreamError
from weft.http.clients import FRONT_HEADER
from weft.http.errors import HttpError

OWNER_HEADER = b"x-weft-owner"  # header with the owner of files and batches
HOP_HEADER = b"x-weft-gateway"  # header with the names of the gateways before this one
CLIENT_HEADER = FRONT_HEADER.encode()  # header with the client of the front of a set

# RFC 9110: fields of one connection, not of the message. The other fields here are set for each upstream.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
FORWARDED_FOR = b"x-forwarded-for"
REWRITTEN = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    FORWARDED_FOR,
    b"x-forwarded-proto",
    HOP_HEADER,
    OWNER_HEADER,
    CLIENT_HEADER,
}
KEYS = frozenset((b"authorization", b"x-api-key", OWNER_HEADER))  # headers that may have the upstream's key
NOT_SENT = REWRITTEN | KEYS
NOT_SENT_TO_COUNTED = NOT_SENT | {b"accept-encoding"}  # the gateway reads the answers of these paths
OPTIONS_OF_CONNECTION = (b"keep-alive", b"close")  # values of a Connection field that name no other field

LOGGED_CHARACTERS = 512  # characters of a path

UNREAD = Fingerprint()

Headers = list[tuple[bytes, bytes]]


class ClientGoneError(UpstreamError):
    """The client has closed its connection."""


class Exchange:
    """One request of a client.

    - `model`, `fingerprint`: the values that routing reads.
    - `completion`: the parameters of a completion. `answer`: its stream, if the gateway reads it.
    - `tried`: replicas that do not get it again. `lost_at`: replicas that died or stalled with it since its answer last
      grew. `attempt`: the running try.
    - `refusal`: the response of a full replica, which is sent if no replica responds better.
    - `gone`: the client has closed its connection. `hops`: names of the gateways before this one.
    - `announced`: length of the body by its head, or 0. `metered`: the tokens of the answer are counted.
    - The other fields are for the access log: `outcome` is "complete" or the code of an error.
    """

    # Class-level defaults, which save an assignment per request.
    body = b""
    client = ANONYMOUS
    bytes_in = announced = 0
    model = ""
    fingerprint = UNREAD
    completion: ForwardedCompletion | None = None
    metered = False
    entered = False  # it is counted by the rates of its key
    owner = b""  # the client's name at upstreams, for files and batches
    client_header = b""  # the client that the front of a set names to a model's server
    attempt: Attempt | None = None
    tries = 0
    refusal: HttpError | None = None
    answer: ResumableAnswer | WholeAnswer | None = None
    reservation: Reservation | None = None
    reserved_at: UpstreamReplica | None = None
    gone = False
    status = bytes_out = 0
    first_byte_s = 0.0
    outcome = "internal-error"  # unless something else is noted
    _digest = b""

    def __init__(self, scope: Scope, gateway: bytes) -> None:
        self.scope = scope
        self.method: bytes = scope["method"].encode()
        self.raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        self.tried: list[UpstreamReplica] = []
        self.lost_at: list[UpstreamReplica] = []
        self.hops: list[bytes] = []
        self.began_s = time.monotonic()
        self._read_headers(gateway)

    def head(self, replica: UpstreamReplica, length: int) -> bytes:
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
        elif not self.client.known:  # without keys of the gateway, these headers are for the upstream
            lines.append(self._keys)
        if self.owner:
            lines.append(b"%b: %b\r\n" % (OWNER_HEADER, self.owner))
        if self.client_header:
            lines.append(b"%b: %b\r\n" % (CLIENT_HEADER, self.client_header))
        return b"".join([*lines, b"\r\n"])

    def _read_headers(self, gateway: bytes) -> None:
        """Write the header fields that are the same for all replicas, and note the fields about earlier gateways."""
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

    def begin_attempt(self, replica: UpstreamReplica) -> Attempt:
        """Note the next try."""
        self.tried.append(replica)
        self.tries += 1
        self.attempt = Attempt(replica, tokens=self.prompt_tokens)
        return self.attempt

    @property
    def digest(self) -> bytes:
        """Digest of the request, computed while its body is held; empty without a body."""
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
        """Cancel the request: the client has disconnected."""
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
    """The header fields that are neither in `dropped` nor named by a Connection field."""
    kept = []
    for pair in headers:
        if pair[0] not in dropped:
            kept.append(pair)
        elif pair[0] == b"connection" and pair[1].lower() not in OPTIONS_OF_CONNECTION:
            named = frozenset(part.strip().lower() for part in pair[1].split(b","))
            if not named <= dropped:
                return without(headers, dropped | named)
    return kept
