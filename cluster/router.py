"""The Serve ingress: one router process, which clients reach over HTTP and gRPC.

A request's way through it:
 1. Serve hands HTTP to the FastAPI application of `http.py` and gRPC to the methods here, which pass it on to
    `grpc_service.py`.
 2. Both check it, tokenise it and lay out its sequences (`planning.py`).
 3. `generation.py` gets a lease from admission and sends the sequences down the one stream to the leased engine
    (`engine_client.py`); tokens come back on it and leave as text.
 4. A client that hangs up is an asyncio.CancelledError here, which ends the request in the engine within a step.
Deployment handles carry control only: where the engines are, and shutdown.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_client import EngineClient
from kvorum.cluster.engine_deployment import EngineReplica
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_service import GrpcService
from kvorum.cluster.http import create_app
from kvorum.cluster.logs import log_to_stderr
from kvorum.cluster.model import load_model
from kvorum.kvstore.errors import EngineLostError

_CONTROL_TIMEOUT_S = 5.0


class Router(GrpcService):
    """Construction and delegation; the work is in the modules named above."""

    def __init__(self, config: ClusterConfig, *engines: DeploymentHandle[EngineReplica]) -> None:
        """Serve what `engines` compute."""
        log_to_stderr()
        self._frontend = Frontend(config, load_model(config), [_client(handle) for handle in engines])
        self._frontend.start()
        super().__init__(self._frontend)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application; Serve calls this after the constructor."""
        return create_app(self._frontend)

    async def is_ready(self) -> bool:
        """Say whether a request would find an engine."""
        return self._frontend.is_ready

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones."""
        await self._frontend.drain(timeout_s)

    async def __del__(self) -> None:
        """Let go of the engines; Serve calls and awaits this at shutdown."""
        await self._frontend.stop()


def _client(handle: DeploymentHandle[EngineReplica]) -> EngineClient:
    async def resolve_address() -> str:
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                address: str | None = await handle.address.remote()
        except Exception as error:  # whatever Ray raises for a replica that is not there
            raise EngineLostError(f"the engine's replica does not answer: {error!r}") from error
        if address is None:
            raise EngineLostError("the engine is loading")
        return address

    return EngineClient(resolve_address)


IngressRouter = serve.ingress()(Router)
