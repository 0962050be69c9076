"""SetProxy: the gateway's proxy in front of a set: a request first waits until its model is awake."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send

from weft.api.ollama.chat import ChatParts, GenerateParts
from weft.api.ollama.keep_alive import parse_keep_alive
from weft.errors import ConfigError, RequestError, WeftError
from weft.fleet.accounts.keys import Keys
from weft.fleet.gateway.accounts import Accounts
from weft.fleet.gateway.bodies import BodyPool
from weft.fleet.gateway.exchange import Exchange
from weft.fleet.gateway.fingerprint import RoutedFields, read_fields
from weft.fleet.gateway.metrics import GatewayMetrics
from weft.fleet.gateway.proxy import Proxy
from weft.fleet.gateway.request_reader import RequestReader
from weft.fleet.hosting.catalogue import Catalogue, SetFleet
from weft.fleet.hosting.keeper import LOAD_TIMEOUT_S, Keeper
from weft.fleet.hosting.residency import State
from weft.fleet.upstreams.config import Objective, Timeouts
from weft.http.body import BodyReceiver
from weft.http.clients import Clients, header_of
from weft.http.errors import HttpError, JsonResponse, error_response
from weft.http.key_file import ClientKey, read_keys
from weft.http.options import ServeOptions

LOADING = {"/api/generate": GenerateParts, "/api/chat": ChatParts}  # paths by which clients load and unload models
KEPT = ("/v1/files", "/v1/batches")
BODY_BYTES = 2**26  # bytes of a request, as the gateway's default
SMALL_BYTES = 2**20  # bytes of a request that the front itself decodes, in the event loop: a name and a few options


def body_limit(options: ServeOptions) -> int:
    """Most bytes of a request's body."""
    return options.max_body_bytes or BODY_BYTES


class SetReader(RequestReader):
    """Reads requests for the models of a set. `keep_alive_s`: the time for which a request asks to keep its model."""

    def __init__(self, fleet: SetFleet, keys: Keys, bodies: BodyPool, accounts: Accounts, catalogue: Catalogue) -> None:
        super().__init__(fleet, keys, bodies, accounts)
        self._catalogue = catalogue
        self.keep_alive_s: WeakKeyDictionary[Exchange, float] = WeakKeyDictionary()

    @property
    def open_to_all(self) -> bool:
        """True if clients need no key. The keys of the models' processes give no further access."""
        return not self.keys.required

    def check_path(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        if any(path == kept or path.startswith(f"{kept}/") for kept in KEPT):
            raise HttpError(
                501,
                f"{path!r:.200} is not served for several models; serve one model for batches",
                code="not-supported",
            )
        if exchange.method in (b"GET", b"HEAD"):
            raise HttpError(404, f"there is nothing at {path!r:.200}", code="unknown-url")
        super().check_path(exchange)

    def check_privileges(self, exchange: Exchange, fields: RoutedFields) -> None:
        super().check_privileges(exchange, fields)
        if fields.keep_alive is not None and exchange.scope["path"].startswith("/api/"):
            try:
                self.keep_alive_s[exchange] = parse_keep_alive(fields.keep_alive, "keep_alive")
            except ConfigError as error:
                raise RequestError(str(error), param="keep_alive", code=error.code) from None

    def model_of(self, fields: RoutedFields, path: str) -> str:
        """The model's own name. Raises HttpError for a request that names none of several models."""
        named = fields.model if isinstance(fields.model, str) else ""
        if not named and path.startswith("/api/") and isinstance(fields.name, str):
            named = fields.name
        return self._catalogue.own_name(named) if named else self._catalogue.only_name()


class SetProxy(Proxy):
    """The ASGI application for the paths of the models' own servers."""

    def __init__(
        self,
        fleet: SetFleet,
        options: ServeOptions,
        catalogue: Catalogue,
        keeper: Keeper,
    ) -> None:
        """Raises ConfigError for a bad file of keys."""
        client_keys, body_bytes = keys_of(options), body_limit(options)
        super().__init__(
            fleet,
            Keys(client_keys, options.admin_key),
            # No timeout, since a queue may be long; `Keeper` notices a process that ends or hangs.
            Timeouts(first_byte=0, idle=0, wait=0),
            GatewayMetrics(fleet),
            bodies=BodyPool(body_bytes, 8 * body_bytes),
            accounts=Accounts(client_keys, None, None, None),
            objective=Objective(),
        )
        self.options, self.catalogue, self.keeper = options, catalogue, keeper
        self.resets = options.reset_on_error
        self._clients = Clients(options)
        self._small = BodyReceiver(min(body_bytes, SMALL_BYTES), on_drop=lambda: None)
        self._limit_s = min(LOAD_TIMEOUT_S, options.request_timeout or LOAD_TIMEOUT_S)
        self.reader: SetReader = SetReader(fleet, self.keys, self.bodies, self.accounts, catalogue)

    async def receive_small(self, request: Request) -> bytes:
        """Receive the body of a request that the front answers itself. Raises HttpError 413 and 503."""
        return await self._small.receive(request)

    async def _serve(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Answer the request once its model is awake."""
        stays_s = self.reader.keep_alive_s.get(exchange)
        client = self._clients.find(Headers(scope=exchange.scope))
        if client is not None:
            exchange.client_header = header_of(client)
        try:
            name = (await self.catalogue.planned(exchange.model)).plan.entry.name
            if stays_s == 0 and (answer := self._unloaded(exchange, name)) is not None:
                exchange.status, exchange.outcome = 200, "complete"
                await answer(exchange.scope, receive, send)
                return
            waiting = self.keeper.lease(name, keep_alive_s=stays_s, gone=lambda: exchange.gone, limit_s=self._limit_s)
            async with waiting:
                await super()._serve(exchange, receive, send)
                if exchange.outcome == "complete" and exchange.status < 500:
                    self.keeper.note_answered(name)
        except WeftError as error:
            await self._refuse(exchange, error, receive, send)

    async def _refuse(self, exchange: Exchange, error: WeftError, receive: Receive, send: Send) -> None:
        if exchange.status:
            raise error  # the answer has begun
        if not isinstance(error, HttpError):
            error = HttpError(503, str(error), code=error.code, retry_after_s=5)
        exchange.status, exchange.outcome = error.status, error.code
        if not exchange.gone:
            await error_response(error, exchange.scope["path"])(exchange.scope, receive, send)

    def _unloaded(self, exchange: Exchange, name: str) -> Response | None:
        """The answer to a request to unload a model that is not awake; None for any other request."""
        kind = LOADING.get(exchange.scope["path"])
        if kind is None or self.keeper.residency.tenants[name].state is State.AWAKE:
            return None
        if not _is_empty(exchange.body):
            return None
        return JsonResponse(kind.part(exchange.model, "", done=True, done_reason="unload"))


def keys_of(options: ServeOptions) -> list[ClientKey]:
    """The keys of the clients, with the names that `Clients` gives them. Raises ConfigError."""
    given = [ClientKey(name=f"--api-key {number}", key=key) for number, key in enumerate(options.api_key, 1)]
    return given if options.api_key_file is None else [*given, *read_keys(options.api_key_file)]


def _is_empty(body: bytes) -> bool:
    """Return True for a body without a prompt."""
    fields = read_fields(body)
    return bytes(fields.prompt) in (b"", b'""', b"null") and bytes(fields.messages) in (b"", b"[]", b"null")
