"""Requests of Ollama's API that load and unload the model of a server."""

from __future__ import annotations

from starlette.requests import Request

from weft.api.ollama.keep_alive import parse_keep_alive
from weft.api.service.service import Service
from weft.errors import ConfigError, RequestError
from weft.http.access import is_owner


def may_unload(request: Request, keep_alive: float | str | None) -> bool:
    """Return True for a `keep_alive` of 0 by which the model is unloaded: of the server's owner, see `check_owner`.

    Other clients would unload the model from under each other. Raises RequestError for a value that is no time.
    """
    if keep_alive is None:
        return False
    try:
        seconds = parse_keep_alive(keep_alive, "keep_alive")
    except ConfigError as error:
        raise RequestError(str(error), param="keep_alive", code=error.code) from None
    service: Service = request.app.state.service
    return seconds == 0 and (service.options.behind_front or is_owner(request))


def load_or_unload(service: Service, unloads: bool) -> None:
    """Unload the model, or have it wake up if it has been unloaded. The front of a set does both itself."""
    if service.options.behind_front:
        return
    if unloads:
        service.unloading.unload()
    else:
        service.unloading.load()
