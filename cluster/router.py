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
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.console.lesson_room import LessonRoom
from kvorum.cluster.console.routes import console_routes
from kvorum.cluster.engine_deployment import EngineAddress, EngineReplica
from kvorum.cluster.engine_directory import Discover, EngineDirectory
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.grpc_service import GrpcService
from kvorum.cluster.http import create_app
from kvorum.cluster.logs import log_to_stderr
from kvorum.cluster.manager.actor import ManagerHandle
from kvorum.cluster.manager.channel import ManagerLostError
from kvorum.cluster.model import load_model
from kvorum.cluster.ray_metrics import RayExport
from kvorum.cluster.tenants import Tenant, TenantTable
from kvorum.kvstore.errors import EngineLostError

logger = logging.getLogger(__name__)

TENANTS: Final = TypeAdapter(dict[str, Tenant])

_CONTROL_TIMEOUT_S = 2.0


class Router(GrpcService):
    """Construction and delegation; the work is in the modules named above."""

    def __init__(self, config: ClusterConfig, engines: DeploymentHandle[EngineReplica]) -> None:
        """Serve what `engines` compute."""
        log_to_stderr(config.log_format)
        self._manager = (
            ManagerHandle(config.control_tls, log_format=config.log_format) if config.cache_manager else None
        )
        self._frontend = Frontend(
            config,
            load_model(config),
            EngineDirectory(_discovery(engines)),
            find_manager=self._manager.find if self._manager else None,
        )
        # Serve hands the tenants over right after the constructor, but opens the ports before.
        self._frontend.tenants = TenantTable.closed()
        self._has_tenants = False
        self._lessons = LessonRoom()
        self._frontend.start()
        export = RayExport(self._frontend.metrics.registry)
        self._exporting = asyncio.create_task(export.run(self._frontend.refresh_metrics))
        super().__init__(self._frontend)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application; Serve calls this after the constructor."""
        app = create_app(self._frontend)
        app.include_router(console_routes(self._frontend, self._lessons.teach))
        return app

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take new tenants; Serve calls this after the constructor and whenever they change.

        Serve ends a router whose call fails, so a running one keeps the tenants it has rather than take wrong ones.
        """
        try:
            tenants = self._frontend.set_tenants(TENANTS.validate_python(user_config["tenants"]))
        except ValidationError:
            if not self._has_tenants:
                raise
            logger.exception("the new tenants are wrong, the old ones hold on")
            return
        self._has_tenants = True
        if self._manager:
            with contextlib.suppress(ManagerLostError):  # it hears of them when it is back
                await self._manager.set_tenants(tenants.limits())

    async def is_ready(self) -> bool:
        """Say whether a request would find an engine."""
        return self._frontend.is_ready

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones."""
        await self._frontend.drain(timeout_s)

    async def __del__(self) -> None:
        """Let go of the engines; Serve calls and awaits this at shutdown."""
        self._exporting.cancel()
        self._lessons.close()
        await self._frontend.stop()


def _discovery(engines: DeploymentHandle[EngineReplica]) -> Discover:
    async def discover() -> dict[str, str]:
        try:
            # In a thread: only there does a replica that does not answer leave the others' answers as they are.
            answers = await asyncio.to_thread(
                engines.broadcast("address").results, timeout_s=_CONTROL_TIMEOUT_S, return_exceptions=True
            )
        except Exception as error:  # whatever Ray raises while there is no replica
            raise EngineLostError(f"the engines' replicas do not answer: {error!r}") from error
        found = [answer for answer in answers if isinstance(answer, EngineAddress)]
        return {each.engine_id: each.address for each in found if each.address is not None}

    return discover


IngressRouter = serve.ingress()(Router)
