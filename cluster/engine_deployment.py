"""One engine as a Serve replica: the engine with its ranks, and the port on which routers reach it.

Loading takes minutes for large models, so it goes on beside the replica's start: until it is done `address` is None and
`progress` says how far it is. A replica whose engine failed to load, or lost a rank, fails its health check, and Serve
starts it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import ray.util

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.logs import log_to_stderr
from kvorum.kvstore.errors import EngineLostError
from kvorum.workers.engine_server import Engine, EngineServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far an engine is. error: why it will not come up, for users."""

    is_ready: bool = False
    loaded_bytes: int = 0
    total_bytes: int = 0
    error: str | None = None


ReportBytes = Callable[[int, int], None]
EngineBuilder = Callable[[ClusterConfig, str, ReportBytes], Awaitable[Engine]]


class EngineReplica:
    """Builds an engine and serves it to routers."""

    def __init__(self, config: ClusterConfig, engine_id: str, build_engine: EngineBuilder) -> None:
        """Start to load; build_engine gets the configuration, the engine's id and a function to report bytes to."""
        log_to_stderr()
        self._config = config
        self._engine_id = engine_id
        self._build_engine = build_engine
        self._progress = LoadProgress()
        self._engine: Engine | None = None
        self._server: EngineServer | None = None
        self._address: str | None = None
        self._loading = asyncio.create_task(self._load())

    async def address(self) -> str | None:
        """Return host:port of the engine's gRPC server, once it is up."""
        return self._address

    async def progress(self) -> LoadProgress:
        """Say how far the engine is."""
        return self._progress

    async def check_health(self) -> None:
        """Raise when the engine failed to load or a rank is dead; Serve calls this."""
        if self._progress.error:
            raise EngineLostError(self._progress.error)
        if self._progress.is_ready and self._engine:
            await self._engine.check_health()

    async def __del__(self) -> None:
        """Let go of ranks and port; Serve calls and awaits this at shutdown."""
        self._loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loading
        if self._server:
            await self._server.stop()
        if self._engine:
            await self._engine.stop()

    async def _load(self) -> None:
        try:
            self._engine = await self._build_engine(self._config, self._engine_id, self._report_bytes)
            await self._engine.start()
            self._server = EngineServer(self._engine)
            host: str = ray.util.get_node_ip_address()
            self._address = f"{host}:{await self._server.start(host)}"
            self._progress = LoadProgress(is_ready=True)
        except Exception as error:
            logger.exception("engine %s failed to start", self._engine_id)
            self._progress = LoadProgress(error=str(error) or repr(error))

    def _report_bytes(self, loaded_bytes: int, total_bytes: int) -> None:
        self._progress = LoadProgress(loaded_bytes=loaded_bytes, total_bytes=total_bytes)
