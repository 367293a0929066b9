"""The HTTP API: OpenAI's routes, kvorum's own, and server-sent events.

A route parses, asks the frontend and writes; whatever is raised becomes an answer in `_add_error_handlers`. A stream's
headers leave only after its first delta, so that an error before the first token has a real status.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TypeVar, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvorum.cluster import openapi
from kvorum.cluster.answers import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Json,
    gather_answers,
    receipt_of,
    usage_of,
)
from kvorum.cluster.calls import Call
from kvorum.cluster.config import MAX_REQUEST_BYTES
from kvorum.cluster.errors import UnforeseenError, http_error_body, retry_after_s, status_of
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.generation import Ending
from kvorum.cluster.http_calls import NoteCalls, call_of
from kvorum.cluster.manager.watching import ViewChange
from kvorum.cluster.metrics import CONTENT_TYPE
from kvorum.cluster.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    unknown_fields,
)
from kvorum.cluster.planning import GenerationRequest, Prompting, check_model
from kvorum.cluster.sampling_fields import RequestFields, invalid_request
from kvorum.cluster.sse import event_stream, event_text
from kvorum.cluster.structured import form_of
from kvorum.kvstore.errors import InvalidRequestError, KvorumError

logger = logging.getLogger(__name__)

_DEFAULT_COMPLETION_TOKENS = 16

_Fields = TypeVar("_Fields", bound=RequestFields)


def create_app(frontend: Frontend) -> FastAPI:
    """Build the HTTP application in front of a frontend."""
    # Pages that show the document would load scripts from elsewhere.
    app = FastAPI(openapi_url=openapi.PATH, docs_url=None, redoc_url=None, generate_unique_id_function=_name)
    openapi.publish(app)
    app.add_middleware(NoteCalls, frontend=frontend)
    _add_error_handlers(app)
    _add_inference_routes(app, frontend)
    _add_model_routes(app, frontend)
    _add_token_routes(app, frontend)
    _add_operator_routes(app, frontend)
    return app


def _name(route: APIRoute) -> str:
    return route.name


def _add_inference_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.post(
        "/v1/chat/completions",
        **openapi.described(openapi.ChatCompletion, openapi.GENERATING, takes=ChatRequest, streams=True),
    )
    async def create_chat_completion(http: Request) -> Response:
        tenant = _authenticate(http, frontend)
        request = await _read(http, ChatRequest)
        check_model(request.model, frontend.model)
        prompt = await frontend.model.encode_chat([message.for_template() for message in request.messages])
        uses_new_name = request.max_completion_tokens is not None
        prompting = Prompting(
            request_id=call_of(http).request_id,
            prompts=(prompt,),
            prompt_param="messages",
            max_tokens=request.max_completion_tokens if uses_new_name else request.max_tokens,
            max_tokens_param="max_completion_tokens" if uses_new_name else "max_tokens",
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            grammar=await frontend.grammar_of(
                form_of(request.response_format, request.structured_outputs), tenant=tenant
            ),
        )
        plan = frontend.plan(request, prompting, tenant=tenant)
        writer = _AnswerWriter(frontend, ChatFormat(frontend.model), plan, call_of(http))
        return await writer.respond(stream=bool(request.stream), include_usage=request.include_usage)

    @app.post(
        "/v1/completions",
        **openapi.described(openapi.Completion, openapi.GENERATING, takes=CompletionRequest, streams=True),
    )
    async def create_completion(http: Request) -> Response:
        tenant = _authenticate(http, frontend)
        request = await _read(http, CompletionRequest)
        check_model(request.model, frontend.model)
        prompts = await _completion_prompts(request, frontend)
        prompting = Prompting(
            request_id=call_of(http).request_id,
            prompts=tuple(prompts),
            prompt_param="prompt",
            max_tokens=request.max_tokens,
            default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
            logprobs=request.logprobs,
            grammar=await frontend.grammar_of(
                form_of(request.response_format, request.structured_outputs), tenant=tenant
            ),
        )
        plan = frontend.plan(request, prompting, tenant=tenant)
        echo = [_echo(sequence.prompt_token_ids, request, frontend) for sequence in plan.sequences]
        writer = _AnswerWriter(frontend, CompletionFormat(frontend.model, echo=echo), plan, call_of(http))
        return await writer.respond(stream=bool(request.stream), include_usage=request.include_usage)


def _add_model_routes(app: FastAPI, frontend: Frontend) -> None:
    card = ModelCard(id=frontend.model.name, created=int(time.time()), max_model_len=frontend.model.max_model_len)

    @app.get("/v1/models", **openapi.described(ModelList, openapi.KEYED))
    async def list_models(http: Request) -> Response:
        _authenticate(http, frontend)
        return _json(ModelList(data=[card]).model_dump())

    @app.get("/v1/models/{name:path}", **openapi.described(ModelCard, (*openapi.KEYED, 404)))
    async def get_model(http: Request, name: str) -> Response:
        _authenticate(http, frontend)
        check_model(name, frontend.model)
        return _json(card.model_dump())


def _add_token_routes(app: FastAPI, frontend: Frontend) -> None:
    model = frontend.model

    @app.post("/tokenize", **openapi.described(TokenizeResponse, openapi.READING, takes=TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        _authenticate(http, frontend)
        request = await _read(http, TokenizeRequest)
        check_model(request.model, model)
        if request.messages is not None:
            tokens = await model.encode_chat([message.for_template() for message in request.messages])
        else:
            add_special_tokens = request.add_special_tokens is not False
            tokens = await model.encode(request.prompt or "", param="prompt", add_special_tokens=add_special_tokens)
        response = TokenizeResponse(tokens=list(tokens), count=len(tokens), max_model_len=model.max_model_len)
        return _json(response.model_dump())

    @app.post("/detokenize", **openapi.described(DetokenizeResponse, openapi.READING, takes=DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        _authenticate(http, frontend)
        request = await _read(http, DetokenizeRequest)
        check_model(request.model, model)
        model.check_token_ids(request.tokens, param="tokens")
        text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return _json(DetokenizeResponse(prompt=text).model_dump())


def _add_operator_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/health", **openapi.described_health())
    async def get_health() -> Response:
        return _json({"status": "ok"}) if frontend.is_ready else _json({"status": "not ready"}, 503)

    @app.get("/version", **openapi.described(openapi.Version, openapi.OPEN))
    async def get_version() -> Response:
        return _json({"version": version("kvorum")})

    @app.get("/operator/cluster", **openapi.described(ViewChange, openapi.OPERATING))
    async def get_cluster(http: Request) -> Response:
        changes = frontend.watch_cluster(tenant=_authenticate(http, frontend))
        try:
            return _json(asdict(await anext(changes)))
        finally:
            await changes.aclose()

    @app.get("/operator/cluster/watch", **openapi.described(openapi.EVENTS, openapi.OPERATING))
    async def watch_cluster(http: Request) -> Response:
        changes = frontend.watch_cluster(tenant=_authenticate(http, frontend))
        events = _change_events(changes)
        return await event_stream(events, call_of(http))

    @app.get("/metrics", **openapi.described("text/plain", openapi.OPEN))
    async def get_metrics() -> Response:
        return Response(await frontend.render_metrics(), media_type=CONTENT_TYPE)


def _add_error_handlers(app: FastAPI) -> None:
    async def answer_kvorum_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, KvorumError)
        call_of(http).refuse(error)
        seconds = retry_after_s(error)
        headers = {} if seconds is None else {"Retry-After": str(seconds)}
        return _json(http_error_body(error), status_of(error).http, headers)

    async def answer_http_exception(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{http.method} {http.url.path}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return _json(body, error.status_code, dict(error.headers or {}))

    async def answer_unforeseen(_: Request, error: Exception) -> Response:
        logger.error("request failed", exc_info=error)
        return _json(http_error_body(UnforeseenError()), 500)

    async def answer_nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(KvorumError, answer_kvorum_error)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_unforeseen)


class _AnswerWriter:
    """Runs one plan and writes the answer, whole or as a stream."""

    def __init__(self, frontend: Frontend, answer_format: AnswerFormat, plan: GenerationRequest, call: Call) -> None:
        self._frontend = frontend
        self._format = answer_format
        self._plan = plan
        self._call = call
        self._envelope: Json = {
            "id": f"{answer_format.id_prefix}-{plan.request_id}",
            "object": answer_format.object_name,
            "created": int(time.time()),
            "model": frontend.model.name,
        }

    async def respond(self, *, stream: bool, include_usage: bool) -> Response:
        """Generate and return the response; what is raised before the first delta becomes its status."""
        if not stream:
            return _json(await self._whole())
        events = self._events(include_usage=include_usage)
        return await event_stream(events, self._call)

    async def _whole(self) -> Json:
        async with self._frontend.answer(self._call, self._plan) as deltas:
            answers = await gather_answers(deltas, len(self._plan.sequences))
        choices = [self._format.choice(index, answer) for index, answer in enumerate(answers)]
        endings = {index: answer.ending for index, answer in enumerate(answers)}
        usage = usage_of(endings, self._plan).model_dump()
        return self._envelope | {
            "choices": choices,
            "usage": usage,
            "kvorum": receipt_of(endings.values()).model_dump(),
        }

    async def _events(self, *, include_usage: bool) -> AsyncGenerator[str]:
        self._envelope["object"] = self._format.chunk_object_name
        if include_usage:
            self._envelope["usage"] = None
        endings: dict[int, Ending] = {}
        opened: set[int] = set()
        async with self._frontend.answer(self._call, self._plan) as deltas:
            async for delta in deltas:
                if delta.index not in opened:
                    opened.add(delta.index)
                    for choice in self._format.opening(delta.index):
                        yield self._chunk(choice)
                if news := self._format.chunk(delta):
                    yield self._chunk(news)
                if delta.ending:
                    endings[delta.index] = delta.ending
                    closing = self._format.closing(delta.index, delta.ending)
                    yield self._chunk(closing, kvorum=receipt_of([delta.ending]).model_dump())
        if include_usage:
            usage = usage_of(endings, self._plan).model_dump()
            yield self._chunk(usage=usage, kvorum=receipt_of(endings.values()).model_dump())
        yield "data: [DONE]\n\n"

    def _chunk(self, *choices: Json, **extras: object) -> str:
        return event_text(self._envelope | {"choices": choices} | extras)


async def _change_events(changes: AsyncGenerator[ViewChange]) -> AsyncGenerator[str]:
    """Write the state of the cluster, and then each change of it, as an event."""
    try:
        async for change in changes:
            yield event_text(asdict(change))
    finally:
        await changes.aclose()


async def _read(http: Request, kind: type[_Fields]) -> _Fields:
    """Parse the body."""
    try:
        request = kind.model_validate_json(await _read_body(http))
    except ValidationError as error:
        raise invalid_request(error) from None
    if unknown := unknown_fields(request):
        # Quoted and bounded: they are the client's words.
        logger.info("ignored unknown fields %s", json.dumps([name[:64] for name in unknown[:16]]))
    return request


async def _read_body(http: Request) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_REQUEST_BYTES:
            raise InvalidRequestError(f"the body is larger than {MAX_REQUEST_BYTES} bytes")
    return bytes(body)


def _authenticate(http: Request, frontend: Frontend) -> str:
    """Return the tenant whose key the request brings."""
    tenant = call_of(http).tenant = frontend.authenticate(http.headers.get("authorization"))
    return tenant


async def _completion_prompts(request: CompletionRequest, frontend: Frontend) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, whichever of the four ways it is written."""
    prompt = request.prompt
    prompts: Sequence[str | Sequence[int]]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]
    else:
        prompts = cast("list[str] | list[list[int]]", prompt)
    if not prompts:
        raise InvalidRequestError("prompt: must not be empty", param="prompt")
    return [await _token_ids(each, frontend) for each in prompts]


async def _token_ids(prompt: str | Sequence[int], frontend: Frontend) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await frontend.model.encode(prompt, param="prompt", add_special_tokens=True)
    return frontend.model.checked_tokens(prompt, param="prompt")


def _echo(token_ids: Sequence[int], request: CompletionRequest, frontend: Frontend) -> str:
    return frontend.model.tokenizer.decode(token_ids, skip_special_tokens=True) if request.echo else ""


def _json(body: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, status, headers)
