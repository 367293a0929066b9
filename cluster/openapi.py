"""The OpenAPI document of the HTTP API, at /openapi.json.

Routes read their bodies by hand, so that every error has OpenAI's form and validation is 400; what they take and answer
is therefore told to FastAPI here, from the same pydantic models that do the reading and writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvorum.cluster.openai import (
    ChatChoice,
    ChatRequest,
    CompletionChoice,
    CompletionRequest,
    DetokenizeRequest,
    KvorumReceipt,
    TokenizeRequest,
    Usage,
)
from kvorum.cluster.sampling_fields import RequestFields

PATH: Final = "/openapi.json"
EVENTS: Final = "text/event-stream"
_REFS = "#/components/schemas/{model}"
_REQUESTS: tuple[type[RequestFields], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

# What each kind of route may refuse with.
OPEN: Final = ()
KEYED: Final = (401,)
READING: Final = (400, *KEYED, 404)
GENERATING: Final = (*READING, 403, 429, 499, 503, 504)
OPERATING: Final = (400, *KEYED, 403, 503)

_MEANINGS = {
    400: "A field is wrong, or the request could never be served; `param` names the field.",
    401: "No API key, or a wrong one.",
    403: "A key that may not do this.",
    404: "No such model is served here.",
    429: "The tenant has all that it may have.",
    499: "The request was aborted.",
    503: "The cluster is full, or has no engine.",
    504: "The request took longer than it may.",
}
# Each event of a stream, as OpenAPI 3.2 and FastAPI describe it.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_EVENTS_CONTENT = {EVENTS: {"itemSchema": _EVENT}}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}


class ErrorDetail(BaseModel):
    """What went wrong; programs look at `code`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


class ChatCompletion(BaseModel):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kvorum: KvorumReceipt


class Completion(BaseModel):
    """A whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kvorum: KvorumReceipt


class Health(BaseModel):
    """Whether requests would be served."""

    status: Literal["ok", "not ready"]


class Version(BaseModel):
    """What runs here."""

    version: str


def described(
    answer: type | str,
    refusals: Sequence[int],
    *,
    takes: type[RequestFields] | None = None,
    streams: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a route that say what it answers, a model or else a media type, and what it takes."""
    success: dict[str, Any] = {"description": "Success."}
    if answer == EVENTS:
        success["content"] = _EVENTS_CONTENT
    elif isinstance(answer, str):
        success["content"] = {answer: {"schema": {"type": "string"}}}
    else:
        success["model"] = answer
    if streams:
        success["content"] = _EVENTS_CONTENT
    arguments: dict[str, Any] = {
        "response_model": None,
        "responses": {200: success} | {status: _refusal(status) for status in sorted(refusals)},
    }
    if takes:
        reference = {"$ref": _REFS.format(model=takes.__name__)}
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        arguments["openapi_extra"] = {"requestBody": body}
    return arguments


def described_health() -> dict[str, Any]:
    """Return what `described` does for /health, whose answers differ in their status alone."""
    arguments = described(Health, OPEN)
    arguments["responses"][503] = {"description": "Requests would find no engine.", "model": Health}
    return arguments


def publish(app: FastAPI) -> None:
    """Have the application serve its document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way


def _refusal(status: int) -> dict[str, Any]:
    refusal: dict[str, Any] = {"description": _MEANINGS[status], "model": ErrorBody}
    return refusal | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="kvorum", version=version("kvorum"), routes=app.routes)
    _, definitions = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REFS)
    components = document["components"]
    components["schemas"] |= definitions["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                operation = document["paths"][route.path_format][method.lower()]
                operation["responses"].pop("422", None)
                if "401" in operation["responses"]:
                    # Either: where no tenants and no key are configured, everybody is served.
                    operation["security"] = [{"key": []}, {}]
    return document
