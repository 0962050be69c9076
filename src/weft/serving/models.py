"""What is served, and its tokeniser: /v1/models, /tokenize, /detokenize, /version."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.errors import RequestError
from weft.serving.errors import JsonResponse
from weft.serving.openai_types import DetokenizeRequest, TokenizeRequest
from weft.serving.service import Service
from weft.text.limits import LIMITS


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonResponse({"object": "list", "data": [row(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonResponse(row(service, service.resolve_model(request.path_params["name"])))


def row(service: Service, name: str) -> dict[str, Any]:
    """One model in OpenAI's words, with vLLM's additions."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "weft",
        "root": service.model,
        "parent": None,
        "max_model_len": service.frontend.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{uuid.uuid5(uuid.NAMESPACE_URL, name).hex}",
                "object": "model_permission",
                "created": service.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    return await service.prepare(request, tokenized)


def tokenized(service: Service, content: bytes) -> Response:
    """The answer to /tokenize, encoded: both take long for a long text."""
    wire = service.decode_body(content, TokenizeRequest)
    service.resolve_model(wire.model)
    if (wire.prompt is None) == (wire.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if wire.messages is not None:
        text, special = service.render(wire.messages, wire), False
    else:
        text, special = wire.prompt or "", wire.add_special_tokens is not False
    service.frontend.check_text(text, least=LIMITS.tokenize_characters)
    ids = service.frontend.encode(text, special=special)
    return JsonResponse({"count": len(ids), "max_model_len": service.frontend.max_model_len, "tokens": ids})


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    return await service.prepare(request, detokenized)


def detokenized(service: Service, content: bytes) -> Response:
    """The answer to /detokenize."""
    wire = service.decode_body(content, DetokenizeRequest)
    service.resolve_model(wire.model)
    return JsonResponse({"prompt": service.frontend.decode(wire.tokens)})


async def version(request: Request) -> Response:
    return JsonResponse({"version": __version__})
