"""One engine as a Serve replica: the engine with its ranks, and the port on which routers reach it.

An engine's life:
 1. It is built beside the replica's start, since loading takes minutes for large models: until it is done it has no
    address, and `progress` says how far it is. If that fails, so does the replica's health check: Serve starts it anew.
 2. It serves until a rank dies or is stuck. Then its streams end, which their routers take up elsewhere, and it is
    built again in the same replica: on the ranks that are left, or from nothing when none is.
 3. Before it stops, be it for a new configuration, it tells its routers to send nothing more, and waits for what runs.
While it serves, its agent speaks with the cache manager.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import ray.util

from kvorum.cluster.autoscaling import LOAD_METRIC, engine_load
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_agent import EngineAgent
from kvorum.cluster.logs import log_to_stderr
from kvorum.cluster.manager.actor import ManagerHandle
from kvorum.cluster.manager.tls import read_tls
from kvorum.kvstore.errors import EngineLostError
from kvorum.workers.engine_server import Engine, EngineServer

logger = logging.getLogger(__name__)

_REBUILD_PERIOD_S = 1.0
_START_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far an engine is. error: why it will not come up, for users."""

    engine_id: str
    is_ready: bool = False
    loaded_bytes: int = 0
    total_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens; address is None while it loads."""

    engine_id: str
    address: str | None


ReportBytes = Callable[[int, int], None]
EngineBuilder = Callable[[ClusterConfig, str, ReportBytes], Awaitable[Engine]]


class EngineReplica:
    """Builds an engine, serves it to routers, and builds it again when it is lost."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, build_engine: EngineBuilder, *, waits_for_model: bool
    ) -> None:
        """Start to load; build_engine gets the configuration, the engine's id and a function to report bytes to.

        waits_for_model: the replica has started, for Serve, only once its model is loaded.
        """
        from ray import serve  # not for those who only ask how far an engine is

        log_to_stderr(config.log_format)
        self._config = config
        self._engine_id = f"engine-{serve.get_replica_context().replica_id.unique_id}"
        self._build_engine = build_engine
        self._progress = LoadProgress(self._engine_id)
        self._address: str | None = None
        self._engine: Engine | None = None
        self._server: EngineServer | None = None
        self._manager = (
            ManagerHandle(config.control_tls, log_format=config.log_format) if config.cache_manager else None
        )
        self._agent: asyncio.Task[None] | None = None
        self._life = asyncio.create_task(self._live())
        while waits_for_model and not self._progress.is_ready:
            await self.check_health()
            await asyncio.sleep(_START_POLL_S)

    async def address(self) -> EngineAddress:
        """Return where the engine's gRPC server is, once it is up."""
        return EngineAddress(self._engine_id, self._address)

    async def progress(self) -> LoadProgress:
        """Say how far the engine is."""
        return self._progress

    async def check_health(self) -> None:
        """Raise when the engine failed to load, or to come back; Serve calls this."""
        if self._life.done():
            raise EngineLostError(self._progress.error or "the engine has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report how loaded the engine is; Serve calls this where engines are scaled."""
        return {LOAD_METRIC: engine_load(self._engine.info, self._engine.stats())} if self._engine else {}

    async def __del__(self) -> None:
        """Drain the engine, then let go of ranks and port; Serve calls and awaits this at shutdown."""
        self._stop_agent()
        if self._server:
            await self._server.drain(self._config.drain_timeout_s)
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    async def _live(self) -> None:
        try:
            engine = await self._build_engine(self._config, self._engine_id, self._report_bytes)
        except Exception as error:
            logger.exception("engine %s failed to start", self._engine_id)
            self._progress = LoadProgress(self._engine_id, error=str(error) or repr(error))
            return
        while True:
            try:
                await self._serve(engine)
                logger.error("engine %s is lost and built again", self._engine_id)
                engine = await self._rebuild(engine)
            except BaseException:
                await engine.stop()
                raise

    async def _rebuild(self, engine: Engine) -> Engine:
        """Build an engine again, on what is left of it if that can be."""
        try:
            return await engine.rebuild()
        except Exception as error:  # whatever it was: the answer is to build from nothing
            logger.warning("engine %s is built from nothing: %r", self._engine_id, error)
            await engine.stop()
        while True:
            try:
                return await self._build_engine(self._config, self._engine_id, self._report_bytes)
            except Exception:  # it was built once, so what is missing now (a node, a file) may come back
                logger.exception("engine %s failed to start", self._engine_id)
                await asyncio.sleep(_REBUILD_PERIOD_S)

    async def _serve(self, engine: Engine) -> None:
        """Serve an engine until it fails."""
        server = EngineServer(engine)
        try:
            await engine.start()
            host: str = ray.util.get_node_ip_address()
            self._address = f"{host}:{await server.start(host)}"
            self._engine, self._server = engine, server
            self._start_agent(engine)
            self._progress = LoadProgress(self._engine_id, is_ready=True)
            await server.failed()
        finally:
            self._stop_agent()
            self._engine = self._server = self._address = None
            self._progress = LoadProgress(self._engine_id)
            await server.stop()

    def _start_agent(self, engine: Engine) -> None:
        if self._manager:
            tls = read_tls(self._config.control_tls) if self._config.control_tls else None
            agent = EngineAgent(engine, self._manager.find, tls=tls)
            self._agent = asyncio.create_task(agent.run(), name="agent")

    def _stop_agent(self) -> None:
        """End the manager's connection, so that it sends nothing more here."""
        if self._agent:
            self._agent.cancel()
            self._agent = None

    def _report_bytes(self, loaded_bytes: int, total_bytes: int) -> None:
        self._progress = LoadProgress(self._engine_id, loaded_bytes=loaded_bytes, total_bytes=total_bytes)
