"""Endpoints about the served models and their tokenizer: /v1/models, /tokenize, /detokenize, /version."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft._version import __version__
from weft.api.service.openai_types import DetokenizeRequest, TokenizeRequest
from weft.api.service.service import Service
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError
from weft.http.errors import JsonResponse


async def list_models(request: Request) -> Response:
    """/v1/models: every name under which the model is served, while it is served."""
    service: Service = request.app.state.service
    return JsonResponse({"object": "list", "data": [describe_model(service, name) for name in service.listed_names]})


async def get_model(request: Request) -> Response:
    """/v1/models/NAME, and the list if NAME is empty."""
    if not request.path_params["name"]:
        return await list_models(request)
    service: Service = request.app.state.service
    return JsonResponse(describe_model(service, service.check_model(request.path_params["name"])))


def describe_model(service: Service, name: str) -> dict[str, Any]:
    """One model object of OpenAI's API, with vLLM's additional fields."""
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
    """/tokenize."""
    service: Service = request.app.state.service
    return await service.prepare_in_steps(request, tokenize_body)


async def tokenize_body(service: Service, content: bytes) -> Response:
    """Tokenize the text or the conversation in a body, and encode the response: both are slow for a long text."""
    body = service.decode_body(content, TokenizeRequest)
    service.resolve_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="prompt-or-messages")
    frontend = service.frontend
    if body.messages is not None:
        arguments = service.template_arguments(body)
        _, ids = await frontend.encode_chat(body.messages, least=LIMITS.tokenize_characters, **arguments)
    else:
        frontend.check_text(body.prompt or "", least=LIMITS.tokenize_characters)
        ids = frontend.encode(body.prompt or "", special=body.add_special_tokens is not False)
    return JsonResponse({"count": len(ids), "max_model_len": frontend.max_model_len, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """/detokenize."""
    service: Service = request.app.state.service
    return await service.prepare(request, detokenize_body)


def detokenize_body(service: Service, content: bytes) -> Response:
    """Decode the token ids in a body."""
    body = service.decode_body(content, DetokenizeRequest)
    service.resolve_model(body.model)
    return JsonResponse({"prompt": service.frontend.decode(body.tokens)})


async def version(request: Request) -> Response:
    """/version."""
    return JsonResponse({"version": __version__})
