"""The constraint on a request's answer: `response_format`, `structured_outputs` and vLLM's older `guided_*` fields."""

from __future__ import annotations

from typing import Any

from weft.api.service.openai_types import SamplingRequest
from weft.engine.core.params import StructuredOutputsParams
from weft.errors import RequestError

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def wanted_output(body: SamplingRequest) -> tuple[StructuredOutputsParams | None, str]:
    """The constraint or None, and the name of its field. Raises RequestError."""
    constraints: dict[str, StructuredOutputsParams] = {}
    if body.structured_outputs:
        constraints["structured_outputs"] = StructuredOutputsParams.convert(body.structured_outputs)
    if (fields := _format_fields(body.response_format)) is not None:
        constraints["response_format"] = StructuredOutputsParams.convert(fields)
    for name, field in GUIDED.items():
        if (value := getattr(body, name)) is not None:
            constraints[name] = StructuredOutputsParams.convert({field: value})
    if len(constraints) > 1:
        raise RequestError(
            f"{' and '.join(constraints)} both say what the answer must be; give one of them",
            param=list(constraints)[1],
            code="several-constraints",
        )
    for name, wanted in constraints.items():
        return wanted, name
    return None, ""


def _format_fields(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of StructuredOutputsParams for a `response_format`."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise _wrong('needs json_schema: {"name": NAME, "schema": SCHEMA}')
        case _:
            raise _wrong(f"is of type {given.get('type')!r:.80}; it can be text, json_object or json_schema")


def _wrong(what: str) -> RequestError:
    return RequestError(f"response_format {what}", param="response_format", code="invalid-response-format")
