"""Ollama's names of models: `NAME` means `NAME:latest`, and a tag the GGUF file that it stands for."""

from __future__ import annotations

from weft.api.ollama.types import ModelRequest
from weft.api.service.service import Service
from weft.checkpoint.hub.model_names import find_tagged
from weft.checkpoint.names import gguf_reference
from weft.checkpoint.names.gguf_reference import GgufReference
from weft.errors import ModelError, RequestError
from weft.http.errors import HttpError


def requested_name(body: ModelRequest) -> str:
    """The model that a body names. Raises RequestError."""
    name = body.model or body.name
    if not name:
        raise RequestError("the body must name a model", param="model", code="model-missing")
    return name


def served_name(service: Service, name: str) -> str | None:
    """The service's own name for `name`; None for another model."""
    if (own := find_tagged(name, service.names)) is not None:
        return own
    wanted = reference_of(name)
    return next((own for own in service.names if wanted is not None and reference_of(own) == wanted), None)


def resolve_served(service: Service, name: str) -> str:
    """`served_name`. Raises HttpError 404, as Ollama does, for a model that is not served here."""
    own = served_name(service, name)
    if own is None or own not in service.visible_names():
        known = ", ".join(map(repr, service.visible_names()))
        raise HttpError(
            404, f"model {name!r:.200} not found; this server serves {known}", code="model-not-found", param="model"
        )
    return own


def reference_of(name: str) -> GgufReference | None:
    """The GGUF file that a name means; None for another name."""
    try:
        return gguf_reference.parse_name(name)
    except ModelError:
        return None
