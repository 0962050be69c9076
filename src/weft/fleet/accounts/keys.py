"""Keys that clients of the gateway send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from weft.http.access import comes_from_here
from weft.http.errors import HttpError
from weft.http.key_file import ClientKey
from weft.http.keys import digest_key, matching_index, sent_key


class GatewayClient(NamedTuple):
    """The sender of a request.

    `known`: it sent a key of the gateway. `models`: the models that it may use; None for all.
    """

    name: str | None = None
    known: bool = False
    admin: bool = False
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


ANONYMOUS = GatewayClient()


class Keys:
    """The keys of a gateway; without keys, any client may send requests. `admin_key` is for administrators."""

    def __init__(self, keys: Sequence[ClientKey], admin_key: str | None) -> None:
        self._admin_key = admin_key
        self.change(keys)

    def change(self, keys: Sequence[ClientKey]) -> None:
        """Identify clients by these keys from now on; running requests go on."""
        self._digests = [key.digest for key in keys]
        self._clients = [_client_of(key) for key in keys]
        if self._admin_key:
            self._digests.append(digest_key(self._admin_key))
            self._clients.append(GatewayClient("admin", True, True))
        self.required = bool(keys)
        self._has_admin = any(client.admin for client in self._clients)

    def identify(self, scope: Scope) -> GatewayClient:
        """The sender of a request. Raises HttpError 401 if keys are required and the request has none of them."""
        client = self._find(scope)
        if client is None and self.required:
            raise HttpError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid-api-key")
        return client or ANONYMOUS

    def check_admin(self, scope: Scope) -> None:
        """Raise HttpError 403 or 401 unless the sender may change the gateway.

        Without an admin key, local processes may, as far as `comes_from_here` recognizes them. No client may if keys
        are required, or on a Unix socket: a local proxy that adds no header may be in front, and its clients' requests
        look like local requests.
        """
        if self._has_admin:
            client = self._find(scope)
            if client is None or not client.admin:
                raise HttpError(401, "the admin key is needed: Authorization: Bearer KEY", code="invalid-admin-key")
            return
        if self.required or not scope.get("client"):
            raise HttpError(
                403, "set WEFT_ADMIN_KEY in the gateway's environment to allow this", code="admin-key-unset"
            )
        if not comes_from_here(scope):
            raise HttpError(
                403,
                "only this machine may do this; set WEFT_ADMIN_KEY in the gateway's environment to allow it elsewhere",
                code="admin-key-unset",
            )

    def _find(self, scope: Scope) -> GatewayClient | None:
        if not self._clients:
            return None
        index = matching_index(self._digests, sent_key(Headers(scope=scope)))
        return None if index is None else self._clients[index]


def _client_of(key: ClientKey) -> GatewayClient:
    return GatewayClient(key.name, True, key.admin, None if key.models is None else frozenset(key.models))
