"""Access to what changes the server: with the admin key, or from this machine."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from weft.http.clients import Clients
from weft.http.errors import HttpError
from weft.http.options import ServeOptions


class GuardedService(Protocol):
    """The state of an application whose endpoints are guarded: its clients with their keys, and its options."""

    clients: Clients
    options: ServeOptions


def check_admin_key(request: Request) -> None:
    """Raise HttpError 401 for a request without the admin key, and 403 if there is no such key."""
    service: GuardedService = request.app.state.service
    if not service.clients.has_admin:
        raise HttpError(403, "set WEFT_ADMIN_KEY in the server's environment to allow this", code="admin-key-unset")
    client = service.clients.find(request.headers)
    if client is None or not client.admin:
        raise HttpError(401, "the admin key is needed: Authorization: Bearer KEY", code="invalid-admin-key")


def check_owner(request: Request) -> None:
    """`check_admin_key`; without such a key, HttpError 403 for a request that does not come from this machine.

    No client may without the key if --api-key, --root-path or --uds is set: such a server may be behind a local proxy
    that adds no header, and its clients' requests look like local requests.
    """
    service: GuardedService = request.app.state.service
    options = service.options
    if service.clients.has_admin or service.clients.required or options.root_path or options.uds is not None:
        check_admin_key(request)
    elif not comes_from_here(request.scope):
        raise HttpError(
            403,
            "only this machine may do this; set WEFT_ADMIN_KEY in the server's environment to allow it elsewhere",
            code="admin-key-unset",
        )


def is_owner(request: Request) -> bool:
    """Return True for a request that passes `check_owner`."""
    try:
        check_owner(request)
    except HttpError:
        return False
    return True


def check_page(request: Request) -> None:
    """Raise HttpError 403 for a request of another server's page in a browser, if no API key keeps it away."""
    service: GuardedService = request.app.state.service
    options, origin = service.options, request.headers.get("origin")
    if origin is None or service.clients.required or {"*", origin} & set(options.allowed_origins):
        return
    if not _is_of_host(origin, request.headers.get("host", "")):
        raise HttpError(
            403, f"pages of {origin!r:.200} may not do this; --allowed-origins allows it", code="foreign-origin"
        )


def comes_from_here(scope: Scope) -> bool:
    """Return True for a request that seems to come from a process of this machine.

    Not a request through a proxy that names its client in a header, nor a request of another server's page in a
    browser, which may also use a name that resolves to this server. A local proxy that adds no header and sends an
    address as Host is not recognized.
    """
    headers, peer = Headers(scope=scope), scope.get("client")
    if "x-forwarded-for" in headers or "forwarded" in headers:
        return False
    if "origin" in headers and not _is_of_host(headers["origin"], headers.get("host", "")):
        return False
    if not peer:
        return True  # not over TCP
    return _names_address(headers.get("host", "")) and ip_address(peer[0]).is_loopback


def _is_of_host(origin: str, host: str) -> bool:
    """Return True for the Origin of a page that this server itself sends."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


def _names_address(host: str) -> bool:
    """Return True for the Host of a request to an IP address or to localhost, with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False
