"""vllm.grpc.engine.VllmEngine: the service by which inference gateways know a vLLM worker, here for a whole cluster.

A gateway renders conversations, tokenises and detokenises; tokens come here and tokens go back. What it asks for goes
the way of every request: tenants, admission, policies, resumes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from importlib.metadata import version

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvorum.cluster.calls import Call
from kvorum.cluster.errors import UnimplementedError
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_calls import CallContext, GrpcCalls, set_error
from kvorum.cluster.vllm_messages import AnswerWriter, generate_fields, model_info, scheduler_load, tokenizer_chunks
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.workers.request import RequestId

VLLM_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
# More than a gateway has running; each is looked up while everybody waits.
_MAX_ABORTED = 10_000


class VllmEngine:
    """The service's RPCs; those `for_gateway` have names that another service has too."""

    def __init__(self, frontend: Frontend) -> None:
        """Serve what `frontend` serves."""
        self._frontend = frontend
        self._gateways = GrpcCalls(frontend, "vllm")
        self._started_s = time.monotonic()
        self._tokenizer: asyncio.Task[tuple[common_pb2.GetTokenizerChunk, ...]] | None = None

    async def generate_for_gateway(
        self, request: pb.GenerateRequest, grpc_context: CallContext
    ) -> AsyncGenerator[Message]:
        """Stream one answer, or send it whole."""
        has_begun = False
        with self._gateways.note(grpc_context, "Generate") as call:
            try:
                self._gateways.authenticate(grpc_context, call)
                fields = generate_fields(request)
                if fields.request_id:
                    call.identify(RequestId(fields.request_id))
                param, prompt = await self._prompt_from_gateway(request)
                plan = await self._gateways.plan(call, fields, prompt, param=param)
                writer = AnswerWriter(plan, streams=request.stream)
                async with self._frontend.answer(call, plan) as deltas:
                    async for delta in deltas:
                        for response in writer.write(delta):
                            has_begun = True
                            yield response
            except Exception as error:
                set_error(grpc_context, error, call, has_begun=has_begun)

    async def abort_for_gateway(self, request: pb.AbortRequest, grpc_context: CallContext) -> pb.AbortResponse:
        """End running Generate calls of this router; ids of none, or of other tenants' calls, are passed over."""
        with self._gateways.answering(grpc_context, "Abort") as call:
            tenant = self._gateways.authenticate(grpc_context, call)
            if len(request.request_ids) > _MAX_ABORTED:
                raise InvalidRequestError(
                    f"request_ids: {len(request.request_ids)} are more than {_MAX_ABORTED}", param="request_ids"
                )
            for request_id in request.request_ids:
                self._frontend.abort(RequestId(request_id), tenant=tenant)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, grpc_context: CallContext) -> pb.HealthCheckResponse:
        """Say whether requests would be served; like every health check, without a key."""
        is_ready = self._frontend.is_ready
        return pb.HealthCheckResponse(healthy=is_ready, message="" if is_ready else "no engine is ready")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, grpc_context: CallContext) -> pb.GetModelInfoResponse:
        """Describe the served model."""
        response = pb.GetModelInfoResponse()
        with self._gateways.answering(grpc_context, "GetModelInfo") as call:
            self._gateways.authenticate(grpc_context, call)
            response.CopyFrom(model_info(self._frontend.model))
        return response

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, grpc_context: CallContext
    ) -> pb.GetServerInfoResponse:
        """Describe the cluster to an operator: to a gateway it is one engine."""
        response = pb.GetServerInfoResponse()
        with self._gateways.answering(grpc_context, "GetServerInfo") as call:
            self._check_operator(grpc_context, call)
            engines = self._frontend.live_engines().values()
            response.server_type = "kvorum"
            response.active_requests = self._frontend.num_running
            response.uptime_seconds = time.monotonic() - self._started_s
            response.data_parallel_size = 1
            response.max_num_seqs = sum(engine.info.max_num_seqs for engine in engines)
            response.block_size = self._frontend.config.block_size
            response.constrained_decoding_start = "first_token"
        return response

    async def GetLoads(self, request: pb.GetLoadsRequest, grpc_context: CallContext) -> pb.GetLoadsResponse:
        """Say to an operator how busy the cluster is: to a gateway it is one engine with one rank."""
        response = pb.GetLoadsResponse()
        with self._gateways.answering(grpc_context, "GetLoads") as call:
            self._check_operator(grpc_context, call)
            view = await self._frontend.look_at_cluster()
            num_queued = sum(tenant.num_waiting for tenant in view.tenants) if view else 0
            response.timestamp = datetime.now(UTC).isoformat()
            response.version = version("kvorum")
            response.dp_rank_count = 1
            response.loads.append(scheduler_load(self._frontend.live_engines(), num_queued=num_queued))
        return response

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, grpc_context: CallContext
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk]:
        """Stream the tokenizer's archive."""
        chunks: tuple[common_pb2.GetTokenizerChunk, ...] = ()
        with self._gateways.answering(grpc_context, "GetTokenizer") as call:
            self._gateways.authenticate(grpc_context, call)
            # A large vocabulary takes long: once, however many ask, or ask and hang up.
            if self._tokenizer is None:
                self._tokenizer = asyncio.create_task(asyncio.to_thread(tokenizer_chunks, self._frontend.model))
            chunks = await asyncio.shield(self._tokenizer)
        for chunk in chunks:
            yield chunk

    async def Embed(self, request: pb.EmbedRequest, grpc_context: CallContext) -> pb.EmbedResponse:
        """Refuse."""
        self._refuse(grpc_context, "Embed", "models that generate text are served here, none that embeds it")
        return pb.EmbedResponse()

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, grpc_context: CallContext
    ) -> common_pb2.FlushCacheResponse:
        """Refuse."""
        self._refuse(
            grpc_context,
            "FlushCache",
            "cached prefixes belong to tenants and are given up where blocks are short, never all at once",
        )
        return common_pb2.FlushCacheResponse()

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, grpc_context: CallContext
    ) -> common_pb2.ProfileResponse:
        """Refuse."""
        self._refuse(grpc_context, "StartProfile", "engines are not profiled over this API; traces go to otlp_endpoint")
        return common_pb2.ProfileResponse()

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, grpc_context: CallContext
    ) -> common_pb2.ProfileResponse:
        """Refuse."""
        self._refuse(grpc_context, "StopProfile", "engines are not profiled over this API; traces go to otlp_endpoint")
        return common_pb2.ProfileResponse()

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, grpc_context: CallContext
    ) -> AsyncGenerator[common_pb2.KvEventBatch]:
        """Refuse."""
        self._refuse(
            grpc_context, "SubscribeKvEvents", "which engine has a prefix is known to the routers, and to nobody else"
        )
        nothing: tuple[common_pb2.KvEventBatch, ...] = ()
        for batch in nothing:
            yield batch

    def _refuse(self, grpc_context: CallContext, method: str, why: str) -> None:
        with self._gateways.answering(grpc_context, method) as call:
            self._gateways.authenticate(grpc_context, call)
            raise UnimplementedError(f"{method}: {why}")

    def _check_operator(self, grpc_context: CallContext, call: Call) -> None:
        self._frontend.tenants.check_operator(self._gateways.authenticate(grpc_context, call))

    async def _prompt_from_gateway(self, request: pb.GenerateRequest) -> tuple[str, tuple[int, ...]]:
        """Return the field that the prompt came in, and its tokens."""
        model = self._frontend.model
        match request.WhichOneof("input"):
            case "text":
                return "text", await model.encode(request.text, param="text", add_special_tokens=True)
            case "tokenized":
                param = "tokenized.input_ids"
                return param, model.checked_tokens(request.tokenized.input_ids, param=param)
        raise InvalidRequestError("input: give tokenized or text", param="input")
