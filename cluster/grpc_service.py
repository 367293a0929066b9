"""The gRPC API: kvorum.inference.v1.InferenceService and grpc.health.v1.Health.

The methods have the names of the RPCs, and their second argument the name by which Serve passes a call's context, so
that a Serve ingress and a plain grpc.aio server can both dispatch to them.
An error is set on the call's context and the method returns: under Serve a raised exception would lose its details.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # has no types

from kvorum.cluster.addresses import is_loopback
from kvorum.cluster.calls import Call
from kvorum.cluster.errors import UnforeseenError, grpc_status_of
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_messages import (
    ConversationFields,
    GenerateFields,
    conversation_fields,
    delta_message,
    generate_fields,
)
from kvorum.cluster.planning import Prompting, check_model
from kvorum.cluster.structured import form_of
from kvorum.kvstore.errors import InvalidRequestError, KvorumError, PermissionDeniedError
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.workers.request import RequestId

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_HEALTH_POLL_S = 0.1


class CallContext(Protocol):
    """What grpc.aio's and Serve's contexts have in common."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return what the client sent beside the request."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the call's status."""

    def set_details(self, details: str) -> None:
        """Set the status's text."""

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        """Set what follows the response."""

    def peer(self) -> str:
        """Return the client's address as gRPC writes it."""
        ...


class GrpcService:
    """Every RPC of a router."""

    def __init__(self, frontend: Frontend) -> None:
        """Serve what `frontend` serves."""
        self._frontend = frontend

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: CallContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one answer."""
        with self._call(grpc_context, "Generate") as call:
            try:
                tenant = self._authenticate(grpc_context, call)
                fields = generate_fields(request)
                if fields.request_id:
                    call.identify(RequestId(fields.request_id))
                prompting = await self._prompting(request, fields, call.request_id)
                plan = self._frontend.plan(fields, prompting, tenant=tenant)
                async with self._frontend.answer(call, plan) as deltas:
                    async for delta in deltas:
                        yield delta_message(plan.request_id, delta, prompt_tokens=plan.prompt_tokens)
            except Exception as error:
                _set_error(grpc_context, error, call)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: CallContext) -> pb.TokenizeResponse:
        """Turn text or a conversation into token ids."""
        response = pb.TokenizeResponse()
        with self._answering(grpc_context, "Tokenize") as call:
            self._authenticate(grpc_context, call)
            model = self._frontend.model
            check_model(request.model, model)
            match request.WhichOneof("input"):
                case "text":
                    add_special_tokens = request.add_special_tokens or not request.HasField("add_special_tokens")
                    token_ids = await model.encode(request.text, param="text", add_special_tokens=add_special_tokens)
                case "chat":
                    token_ids = await self._encode_chat(conversation_fields(request.chat))
                case _:
                    raise InvalidRequestError("input: give text or chat", param="input")
            response.token_ids.extend(token_ids)
            response.max_model_len = model.max_model_len
        return response

    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: CallContext) -> pb.ListModelsResponse:
        """Name the served model."""
        response = pb.ListModelsResponse()
        with self._answering(grpc_context, "ListModels") as call:
            self._authenticate(grpc_context, call)
            model = self._frontend.model
            response.models.add(id=model.name, max_model_len=model.max_model_len)
        return response

    async def Abort(self, request: pb.AbortRequest, grpc_context: CallContext) -> pb.AbortResponse:
        """End a running Generate call of this router."""
        with self._answering(grpc_context, "Abort") as call:
            tenant = self._authenticate(grpc_context, call)
            if not self._frontend.abort(RequestId(request.request_id), tenant=tenant):
                grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
                grpc_context.set_details(f"no request {request.request_id[:256]!r} is running here")
        return pb.AbortResponse()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        """Say whether requests would be served."""
        if not _is_known(request.service):
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"unknown service {request.service[:256]!r}")
        return health_pb2.HealthCheckResponse(status=self._health())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Say so now and with each change, until the router shuts down."""
        last: int | None = None
        while True:
            status = self._health() if _is_known(request.service) else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if self._frontend.is_draining:
                return
            await asyncio.sleep(_HEALTH_POLL_S)

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: CallContext
    ) -> health_pb2.HealthListResponse:
        """Say so for each service."""
        status = health_pb2.HealthCheckResponse(status=self._health())
        return health_pb2.HealthListResponse(statuses={"": status, SERVICE_NAME: status})

    def _health(self) -> int:
        statuses = health_pb2.HealthCheckResponse
        status: int = statuses.SERVING if self._frontend.is_ready else statuses.NOT_SERVING
        return status

    def _call(self, grpc_context: CallContext, method: str) -> Call:
        texts = ((key, value) for key, value in grpc_context.invocation_metadata() or () if isinstance(value, str))
        return self._frontend.call("grpc", method, generates=method == "Generate", headers=dict(texts))

    @contextlib.contextmanager
    def _answering(self, grpc_context: CallContext, method: str) -> Iterator[Call]:
        """Note a call; what is raised becomes its status."""
        with self._call(grpc_context, method) as call:
            try:
                yield call
            except Exception as error:
                _set_error(grpc_context, error, call)

    def _authenticate(self, grpc_context: CallContext, call: Call) -> str:
        """Return the tenant whose key the call brings."""
        # Serve's gRPC port is open on all interfaces whatever the host: what was not to be reached is not served.
        if is_loopback(self._frontend.config.host) and not is_loopback(_peer_host(grpc_context.peer())):
            raise PermissionDeniedError(
                f"this server takes calls from its own machine only ({self._frontend.config.host})"
            )
        values = [value for key, value in grpc_context.invocation_metadata() or () if key == "authorization"]
        value = values[0] if values else None
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        call.tenant = self._frontend.authenticate(text)
        return call.tenant

    async def _prompting(self, request: pb.GenerateRequest, fields: GenerateFields, request_id: RequestId) -> Prompting:
        model = self._frontend.model
        check_model(fields.model, model)
        match request.WhichOneof("input"):
            case "text":
                param, prompt = "text", await model.encode(request.text, param="text", add_special_tokens=True)
            case "token_ids":
                param, prompt = "token_ids", tuple(request.token_ids.ids)
                model.check_token_ids(prompt, param="token_ids")
            case "chat":
                param, prompt = "chat", await self._encode_chat(fields.chat)
            case _:
                raise InvalidRequestError("input: give text, token_ids or chat", param="input")
        return Prompting(
            request_id=request_id,
            prompts=(prompt,),
            prompt_param=param,
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            grammar=await self._frontend.grammar_of(form_of(None, fields.structured_outputs)),
        )

    async def _encode_chat(self, chat: ConversationFields | None) -> tuple[int, ...]:
        assert chat, "the fields hold what the request's input is"
        return await self._frontend.model.encode_chat([message.for_template() for message in chat.messages])


def _peer_host(peer: str) -> str:
    """Return the host of `ipv4:1.2.3.4:5`, `ipv6:[::1]:5` (the brackets perhaps percent-encoded) or `unix:…`."""
    kind, _, address = unquote(peer).partition(":")
    return "localhost" if kind == "unix" else address.rpartition(":")[0].strip("[]")


def _is_known(service: str) -> bool:
    return service in ("", SERVICE_NAME)


def _set_error(grpc_context: CallContext, error: Exception, call: Call) -> None:
    if not isinstance(error, KvorumError):
        logger.error("call failed", exc_info=error)
        error = UnforeseenError()
    if call.first_token_s is None:
        call.refuse(error)
    else:
        call.fail(error)
    status = grpc_status_of(error)
    grpc_context.set_code(status.code)
    grpc_context.set_details(status.details)
    grpc_context.set_trailing_metadata(list(status.trailing_metadata or ()))
