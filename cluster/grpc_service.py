"""The gRPC API: kvorum.inference.v1.InferenceService, grpc.health.v1.Health, and the gateways' VllmEngine.

The methods have the names of the RPCs, and their second argument the name by which Serve passes a call's context, so
that a Serve ingress and a plain grpc.aio server can both dispatch to them. Serve looks only at the last part of an
RPC's path: the names that two services share are told apart by the type of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # has no types
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_calls import CallContext, GrpcCalls, set_error
from kvorum.cluster.grpc_messages import (
    ConversationFields,
    GenerateFields,
    conversation_fields,
    delta_message,
    generate_fields,
)
from kvorum.cluster.planning import check_model
from kvorum.cluster.vllm_engine import VLLM_SERVICE_NAME, VllmEngine
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.workers.request import RequestId

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_SERVICE_NAMES = ("", SERVICE_NAME, VLLM_SERVICE_NAME)
_HEALTH_POLL_S = 0.1


class GrpcService(VllmEngine):
    """Every RPC of a router."""

    def __init__(self, frontend: Frontend) -> None:
        """Serve what `frontend` serves."""
        super().__init__(frontend)
        self._calls = GrpcCalls(frontend, "grpc")

    async def Generate(
        self, request: pb.GenerateRequest | vllm_pb.GenerateRequest, grpc_context: CallContext
    ) -> AsyncGenerator[Message]:
        """Stream one answer, as the service writes it whose request came."""
        answer: AsyncGenerator[Message] = (
            self.generate_for_gateway(request, grpc_context)
            if isinstance(request, vllm_pb.GenerateRequest)
            else self._generate(request, grpc_context)
        )
        async with contextlib.aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def _generate(self, request: pb.GenerateRequest, grpc_context: CallContext) -> AsyncGenerator[Message]:
        with self._calls.note(grpc_context, "Generate") as call:
            try:
                self._calls.authenticate(grpc_context, call)
                fields = generate_fields(request)
                if fields.request_id:
                    call.identify(RequestId(fields.request_id))
                param, prompt = await self._prompt_of(request, fields)
                answer = self._frontend.model.checked_tokens(request.answer_token_ids, param="answer_token_ids")
                plan = await self._calls.plan(call, fields, prompt, param=param, answer=answer)
                async with self._frontend.answer(call, plan) as deltas:
                    async for delta in deltas:
                        yield delta_message(plan.request_id, delta, prompt_tokens=plan.prompt_tokens)
            except Exception as error:
                set_error(grpc_context, error, call, has_begun=call.first_token_s is not None)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: CallContext) -> pb.TokenizeResponse:
        """Turn text or a conversation into token ids."""
        response = pb.TokenizeResponse()
        with self._calls.answering(grpc_context, "Tokenize") as call:
            self._calls.authenticate(grpc_context, call)
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
        with self._calls.answering(grpc_context, "ListModels") as call:
            self._calls.authenticate(grpc_context, call)
            model = self._frontend.model
            response.models.add(id=model.name, max_model_len=model.max_model_len)
        return response

    async def Abort(
        self, request: pb.AbortRequest | vllm_pb.AbortRequest, grpc_context: CallContext
    ) -> pb.AbortResponse | vllm_pb.AbortResponse:
        """End a running Generate call of this router, of the service whose request came."""
        if isinstance(request, vllm_pb.AbortRequest):
            return await self.abort_for_gateway(request, grpc_context)
        with self._calls.answering(grpc_context, "Abort") as call:
            tenant = self._calls.authenticate(grpc_context, call)
            if not self._frontend.abort(RequestId(request.request_id), tenant=tenant):
                grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
                grpc_context.set_details(f"no request {request.request_id[:256]!r} is running here")
        return pb.AbortResponse()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        """Say whether requests would be served."""
        if request.service not in _SERVICE_NAMES:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"unknown service {request.service[:256]!r}")
        return health_pb2.HealthCheckResponse(status=self._health())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Say so now and with each change, until the router shuts down."""
        last: int | None = None
        while True:
            status = (
                self._health() if request.service in _SERVICE_NAMES else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            )
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
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(_SERVICE_NAMES, status))

    def _health(self) -> int:
        statuses = health_pb2.HealthCheckResponse
        status: int = statuses.SERVING if self._frontend.is_ready else statuses.NOT_SERVING
        return status

    async def _prompt_of(self, request: pb.GenerateRequest, fields: GenerateFields) -> tuple[str, tuple[int, ...]]:
        """Return the field that the prompt came in, and its tokens."""
        model = self._frontend.model
        check_model(fields.model, model)
        match request.WhichOneof("input"):
            case "text":
                return "text", await model.encode(request.text, param="text", add_special_tokens=True)
            case "token_ids":
                return "token_ids", model.checked_tokens(request.token_ids.ids, param="token_ids")
            case "chat":
                return "chat", await self._encode_chat(fields.chat)
        raise InvalidRequestError("input: give text, token_ids or chat", param="input")

    async def _encode_chat(self, chat: ConversationFields | None) -> tuple[int, ...]:
        assert chat, "the fields hold what the request's input is"
        return await self._frontend.model.encode_chat([message.for_template() for message in chat.messages])
