"""RequestReader: receives requests, reads the fields that routing needs, and refuses forbidden requests."""

from __future__ import annotations

from hashlib import blake2b

from starlette.datastructures import Headers
from starlette.types import Receive

from weft.checkpoint.hub.model_names import LATEST
from weft.fleet.accounts.keys import Keys
from weft.fleet.gateway.accounts import Accounts
from weft.fleet.gateway.bodies import BodyPool
from weft.fleet.gateway.completion import COUNTED, PATHS, ForwardedCompletion, check_counted
from weft.fleet.gateway.exchange import Exchange
from weft.fleet.gateway.fingerprint import RoutedFields, fingerprint, model_of, read_fields, read_object
from weft.fleet.upstreams.fleet import Fleet, unknown_model
from weft.fleet.upstreams.paths import BATCHES, DISK, PUBLIC, WITH_FORMS, is_kept, is_public
from weft.http.errors import HttpError

WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
METHODS = (*WITHOUT_BODY, "POST", "PUT", "PATCH", "DELETE")  # of requests that are passed on uncounted
COUNTED_METHODS = ("POST", "OPTIONS")  # browsers ask with OPTIONS before they send a POST to another site
MODEL_CHARACTERS = 512  # characters of a name, which the log and the ledger keep


class RequestReader:
    """Fills in an `Exchange`, by the gateway's keys, accounts and models."""

    def __init__(self, fleet: Fleet, keys: Keys, bodies: BodyPool, accounts: Accounts) -> None:
        self.fleet, self.keys = fleet, keys
        self._bodies, self._accounts = bodies, accounts

    def identify(self, exchange: Exchange) -> None:
        """Identify the sender of a request. Raises HttpError for an unknown key, or a path that it may not use."""
        exchange.client = self.keys.identify(exchange.scope)
        self.check_path(exchange)
        check_method(exchange)

    async def read_request(self, exchange: Exchange, receive: Receive) -> None:
        """Receive the body, read the fields that routing needs, and count the request. Raises WeftError."""
        scope = exchange.scope
        exchange.body = await self._bodies.receive(exchange.announced, receive)
        exchange.bytes_in = len(exchange.body)
        if exchange.body and scope["method"] in WITHOUT_BODY:
            raise HttpError(
                400,
                f"a {scope['method']} request must not have a body: the gateway does not read it",
                code="unexpected-body",
            )
        fields = self._read_fields(exchange)
        self.check_privileges(exchange, fields)
        if scope["method"] == "POST" and scope["path"] in COUNTED:
            exchange.metered = self._accounts.meters(exchange)
            if exchange.metered:
                check_counted(fields)
            exchange.completion = ForwardedCompletion(fields, scope["path"])
        exchange.model = self.model_of(fields, scope["path"])
        policy = self.fleet.policy
        if policy.reads_prefix or policy.reads_session:
            headers = Headers(scope=exchange.scope)
            exchange.fingerprint = fingerprint(fields, headers, reads_prefix=policy.reads_prefix)
        self._check_model(exchange)
        self._accounts.enter(exchange)

    def _check_model(self, exchange: Exchange) -> None:
        """Raise HttpError for a model that the key may not use, or that no replica serves."""
        model, client = exchange.model, exchange.client
        if len(model) > MODEL_CHARACTERS:
            raise HttpError(
                400,
                f"model has {len(model)} characters; a name has at most {MODEL_CHARACTERS}",
                code="model-name-too-long",
                param="model",
            )
        if not client.may_use(model) and exchange.scope["method"] not in ("GET", "HEAD"):
            raise HttpError(
                403, f"the key {client.name!r} is not allowed to use model {model!r:.200}", code="model-not-allowed"
            )
        if self.fleet.replicas and not self.fleet.knows_model(model):
            raise unknown_model(model)

    @staticmethod
    def _read_fields(exchange: Exchange) -> RoutedFields:
        """The fields of a request. Raises HttpError 400 for a body that must be a JSON object but is not.

        An upstream might find a model or a limit in it that keys and accounts do not see.
        """
        path, body = exchange.scope["path"], exchange.body
        if exchange.scope["method"] != "POST" or path not in PUBLIC or path in WITH_FORMS:
            return read_fields(body)
        return read_object(body) if body or path in COUNTED else RoutedFields()

    def model_of(self, fields: RoutedFields, path: str) -> str:
        """The model that a request asks for; in Ollama's API, NAME and NAME:latest are the same.

        Empty for a request about files of models.
        """
        if path.startswith(DISK):
            return ""
        model = model_of(fields)
        if not path.startswith("/api/"):
            return model
        if not model and isinstance(fields.name, str):
            model = fields.name
        if self.fleet.knows_model(model):
            return model
        other = model.removesuffix(LATEST) if model.endswith(LATEST) else model + LATEST
        return other if self.fleet.knows_model(other) else model

    @property
    def open_to_all(self) -> bool:
        """True if neither the gateway nor an upstream has keys: all clients may do everything that the gateway may."""
        return not self.keys.required and all(replica.key is None for replica in self.fleet.replicas.values())

    def check_path(self, exchange: Exchange) -> None:
        """Raise HttpError 403 for a path by which a client could change an upstream, using the gateway's key."""
        path: str = exchange.scope["path"]
        raw_path = exchange.raw_path
        if exchange.client.known and not exchange.client.admin and is_kept(path, raw_path):
            exchange.owner = owner_of(exchange.client.name or "")
            self._check_kept(exchange)
            return
        if not exchange.client.admin and not is_public(path, raw_path) and not self.open_to_all:
            raise HttpError(
                403,
                f"{path!r:.200} of the upstreams needs an admin key of the gateway; {', '.join(PATHS)} and the like "
                "are open to all clients",
                code="path-not-public",
            )

    def _check_kept(self, exchange: Exchange) -> None:
        """Raise HttpError 403 for files that no upstream separates per key, and for work that no limit would count."""
        if not any(replica.is_weft for replica in self.fleet.replicas.values()):
            raise HttpError(
                403, "no upstream separates files per key; this needs an upstream of Weft", code="files-not-kept-apart"
            )
        client, path = exchange.client, exchange.scope["path"]
        if exchange.method != b"POST" or path.endswith("/cancel"):
            return
        if client.models is not None or self._accounts.limits_tokens(client.name):
            raise HttpError(
                403,
                f"batch requests cannot be checked against the models, tpm or quota of the key {client.name!r}; use a "
                "key without them",
                code="batch-not-counted",
            )
        if path == BATCHES and self._accounts.counts_requests(client.name):
            raise HttpError(
                403,
                f"batch requests would not count toward rpm and concurrent of the key {client.name!r}, nor in the "
                "gateway's ledger; use an admin key, or a key without rpm and concurrent at a gateway without a ledger",
                code="batch-not-counted",
            )

    def check_privileges(self, exchange: Exchange, fields: RoutedFields) -> None:
        """Raise HttpError 403 for a client that may neither give the beginning of an answer nor unload a model.

        Upstreams with keys would allow it to the gateway, so only administrators may do it.
        """
        if fields.continue_token_ids is None and fields.keep_alive is None:
            return
        if exchange.client.admin or self.open_to_all:
            return
        path = exchange.scope["path"]
        if fields.continue_token_ids and path in COUNTED:
            raise HttpError(403, "continue_token_ids needs an admin key of the gateway", code="not-admin")
        if fields.keep_alive is not None and path.startswith("/api/"):
            raise HttpError(
                403,
                "keep_alive loads and unloads models for all clients; it needs an admin key of the gateway",
                code="not-admin",
            )


def check_method(exchange: Exchange) -> None:
    """Raise HttpError 405 for a method that an upstream might treat as POST, with work that is not counted."""
    method, path = exchange.scope["method"], exchange.scope["path"]
    allowed = COUNTED_METHODS if path in COUNTED else METHODS
    if method not in allowed:
        raise HttpError(
            405,
            f"{method!r:.40} of {path!r:.200}: the gateway passes {', '.join(allowed)} on",
            code="method-not-allowed",
            headers={"Allow": ", ".join(allowed)},
        )


def owner_of(name: str) -> bytes:
    """The name by which upstreams know the files of a key; it stays if the key itself changes."""
    return blake2b(name.encode(errors="replace"), digest_size=16).hexdigest().encode()
