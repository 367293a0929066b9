"""Both protocols in front of a stack, and what an error looks like in each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
import httpx
import uvicorn
from fastapi import FastAPI
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # has no types
from grpc_health.v1 import health, health_pb2_grpc  # type: ignore[import-untyped]  # has no types
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]  # has no types
from grpc_status import rpc_status  # type: ignore[import-untyped]  # has no types
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_service import SERVICE_NAME, GrpcService
from kvorum.cluster.http import create_app
from kvorum.cluster.vllm_engine import VLLM_SERVICE_NAME
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc


class HasFrontend(Protocol):
    """Something with one router's frontend."""

    @property
    def frontend(self) -> Frontend: ...


# Stubs, calls and details are made at run time or by generators that write no types.
Unchecked: TypeAlias = Any


@contextlib.asynccontextmanager
async def http_client(stack: HasFrontend) -> AsyncIterator[httpx.AsyncClient]:
    """Talk to the application without a socket; a response is there when all of it is."""
    transport = httpx.ASGITransport(create_app(stack.frontend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvorum", timeout=30) as client:
        yield client


@contextlib.asynccontextmanager
async def http_server(app: FastAPI) -> AsyncIterator[str]:
    """Serve an application on a real port, for streams that never end, and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def grpc_server(stack: HasFrontend) -> AsyncIterator[str]:
    """Serve all RPCs on a plain grpc.aio server and yield its target."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    service = GrpcService(stack.frontend)
    pb_grpc.add_InferenceServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated code
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    vllm_grpc.add_VllmEngineServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated code
    names = [SERVICE_NAME, VLLM_SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@contextlib.asynccontextmanager
async def grpc_channel(stack: HasFrontend) -> AsyncIterator[grpc.aio.Channel]:
    """Serve all RPCs, and connect to them."""
    async with grpc_server(stack) as target, grpc.aio.insecure_channel(target) as channel:
        yield channel


@contextlib.asynccontextmanager
async def grpc_stub(stack: HasFrontend) -> AsyncIterator[Unchecked]:
    """Return a stub of InferenceService."""
    async with grpc_channel(stack) as channel:
        yield pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code


async def failure_of(call: Unchecked) -> grpc.aio.AioRpcError:
    """Run a call that must fail and return its error."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call did not fail")


def details_of(error: grpc.RpcError) -> dict[str, Unchecked]:
    """Return the google.rpc details of an error, by the names of their types."""
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    found: dict[str, Unchecked] = {}
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        for kind in kinds:
            detail = kind()
            if packed.Unpack(detail):
                found[kind.DESCRIPTOR.name] = detail
    return found


async def assert_refused(
    call: Unchecked, code: grpc.StatusCode, *, param: str | None, about: str = ""
) -> dict[str, Unchecked]:
    """Check a failed call's status and the field it names; return its details."""
    error = await failure_of(call)
    assert error.code() is code, (about, error)
    assert len(error.details() or "") < 500, about
    details = details_of(error)
    assert details["ErrorInfo"].domain == "kvorum"
    violations = details["BadRequest"].field_violations if "BadRequest" in details else []
    assert [violation.field for violation in violations] == ([param] if param else []), (about, error.details())
    return details
