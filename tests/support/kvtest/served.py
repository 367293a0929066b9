"""The real model in this process: an engine behind its gRPC stream, and a router in front of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_directory import EngineDirectory
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.model import load_model
from kvorum.workers.engine_server import EngineServer
from kvtest.embedded import embedded_cpu_backend
from kvtest.engines import rig
from kvtest.waiting import eventually


@dataclass(frozen=True)
class Served:
    """What tests of the protocols need."""

    frontend: Frontend


@contextlib.asynccontextmanager
async def embedded_model_served(**options: str) -> AsyncIterator[Served]:
    """Serve the embedded model without a cache manager; options are EngineConfig's."""
    config = ClusterConfig(cache_manager=False)
    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(rig(embedded_cpu_backend(**options), num_blocks=160, note_kept=False))
        server = EngineServer(it.engine)
        address = f"127.0.0.1:{await server.start('127.0.0.1')}"
        stack.push_async_callback(server.stop)

        async def discover() -> dict[str, str]:
            return {it.engine.info.engine_id: address}

        frontend = Frontend(config, load_model(config), EngineDirectory(discover, period_s=0.05))
        frontend.start()
        stack.push_async_callback(frontend.stop)
        await eventually(lambda: frontend.is_ready)
        yield Served(frontend)
