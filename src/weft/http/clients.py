"""The clients of a server by their keys: permissions, rates and shares of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.datastructures import Headers

from weft.engine.core.request import Request
from weft.errors import ConfigError
from weft.http.key_file import ClientKey, read_keys
from weft.http.key_rates import KeyRates
from weft.http.keys import digest_key, matching_index, sent_key
from weft.http.options import ServeOptions

FRONT_HEADER = "x-weft-client"  # by which the front of a set names a request's client to a model's server


class Client(NamedTuple):
    """The sender of a request. `number` is 0 for a client without a key, and unique for each client with a key.

    `models`: the models that it may use; None for all. `salt`: a part of the identity of its cached prefixes.
    """

    name: str = ""
    number: int = 0
    weight: float = 1.0
    admin: bool = False
    models: frozenset[str] | None = None
    salt: str = ""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def sign(self, request: Request) -> Request:
        """The request with its owner and with a salt that separates the owner's cached prefixes."""
        if not self.number:
            return request
        identity = request.identity
        if self.salt:
            identity = replace(identity, cache_salt=f"{self.salt}\0{identity.cache_salt or ''}")
        return replace(request, owner=self.number, weight=self.weight, identity=identity)


ANYBODY = Client()
current: ContextVar[Client] = ContextVar("client", default=ANYBODY)


class FrontClient(msgspec.Struct, frozen=True):
    """The part of a `Client` that affects a model's engine."""

    name: str
    number: int
    weight: float
    salt: str


def header_of(client: Client) -> bytes:
    """Value of the header for a client of the front, in ASCII."""
    return json.dumps(
        {"name": client.name, "number": client.number, "weight": client.weight, "salt": client.salt}
    ).encode("ascii")


def client_from_header(own: Client, headers: Headers) -> Client:
    """The client that the front names in a request with its key; `own`, the front itself, if it names none."""
    text = headers.get(FRONT_HEADER)
    if text is None:
        return own
    client = msgspec.json.decode(text, type=FrontClient)
    return own._replace(name=client.name, number=client.number, weight=client.weight, salt=client.salt)


class Clients:
    """The clients that have keys: from --api-key, --api-key-file, and the administrator's."""

    def __init__(self, options: ServeOptions) -> None:
        """Read the key file. Raises ConfigError."""
        given = [ClientKey(name=f"--api-key {number}", key=key) for number, key in enumerate(options.api_key, 1)]
        others = {key.name: key.key for key in given} | {"the administrator (WEFT_ADMIN_KEY)": options.admin_key}
        keys = read_keys(options.api_key_file, others) if options.api_key_file is not None else []
        _check_served(keys, options.api_key_file or "")
        self.weighted = next((key.name for key in keys if key.weight is not None), None)
        self.rates = KeyRates(keys)
        # With a single key there is no other client to separate prefixes from.
        salted = options.prefix_cache_per_key and len(keys) + len(given) > 1
        self._behind_front = options.behind_front
        self._digests: list[bytes] = []
        self._clients: list[Client] = []
        for number, key in enumerate((*given, *keys), 1):
            self._digests.append(key.digest)
            models = None if key.models is None else frozenset(key.models)
            salt = f"key\0{key.name}" if salted else ""
            self._clients.append(Client(key.name, number, key.weight or 1.0, key.admin, models, salt))
        self.required = bool(self._clients)
        self.has_admin = options.admin_key is not None or any(key.admin for key in keys)
        if options.admin_key:
            # The administrator may do everything that clients may, and continue answers.
            self._digests.append(digest_key(options.admin_key))
            self._clients.append(Client("admin", len(self._clients) + 1, admin=True))

    def find(self, headers: Headers) -> Client | None:
        """The client whose key a request has; None without a key."""
        index = matching_index(self._digests, sent_key(headers))
        if index is None:
            return None
        client = self._clients[index]
        return client_from_header(client, headers) if self._behind_front else client

    def key_of(self, headers: Headers) -> str:
        """Digest of a request's key, 64 hexadecimal digits; "" without a key, or on a server without keys."""
        key = sent_key(headers) if self.required else ""
        return digest_key(key).hex() if key else ""

    def of_batch(self, key: str, owner: str) -> Client | None:
        """The client that stored a batch; None if the server requires keys and the client's key is not among them.

        `key` is the `key_of` its request. Earlier versions stored none: there `owner`, the name under which its files
        are stored, may be the beginning of a digest.
        """
        for digest, client in zip(self._digests, self._clients, strict=True):
            if digest.hex() == key or (owner and not key and digest.hex().startswith(owner)):
                return client
        return None if self.required else ANYBODY


def _check_served(keys: Iterable[ClientKey], path: str) -> None:
    """Raise ConfigError for limits that only a gateway counts."""
    for key in keys:
        if key.quota is not None:
            raise ConfigError(
                f"quota of {key.name!r} in {path} needs a gateway's ledger; weft serve has rpm, tpm and concurrent",
                code="quota-without-ledger",
            )
