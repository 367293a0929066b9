"""A whole router without Ray: the fake engine behind its real gRPC stream, and a frontend in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_client import EngineClient
from kvorum.cluster.engine_directory import EngineDirectory
from kvorum.cluster.frontend import Frontend
from kvorum.workers.engine import Engine
from kvorum.workers.engine_server import EngineServer
from kvorum.workers.fake_engine import build_fake_engine
from kvorum.workers.request import EngineInfo, EngineStats
from kvtest.tiny_model import tiny_model
from kvtest.waiting import eventually

DEFAULT_INFO = EngineInfo(
    engine_id="engine-0",
    model_name="tiny",
    max_model_len=512,
    vocab_size=257,
    num_blocks=64,
    block_size=16,
    max_num_seqs=4,
    max_num_waiting=4,
)

IDLE_STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    blocks_free=0,
    blocks_held=0,
    blocks_cached=0,
    steps_total=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    prefix_cache_queries_total=0,
    prefix_cache_hits_total=0,
    preemptions_total=0,
)


@dataclass
class EngineHost:
    """An engine and its server, as an engine replica has them; address is what a router asks for."""

    engine: Engine
    server: EngineServer
    address: str = ""
    ranks_are_alive: bool = True

    @classmethod
    async def start(cls, info: EngineInfo = DEFAULT_INFO, *, step_delay_s: float = 0.0) -> EngineHost:
        engine = build_fake_engine(info, max_num_batched_tokens=256, step_delay_s=step_delay_s)
        host = cls(engine, EngineServer(engine, heartbeat_interval_s=0.02))
        engine.check_health = host.check_health  # type: ignore[method-assign]  # a rank that can be made to die
        await engine.start()
        host.address = f"127.0.0.1:{await host.server.start('127.0.0.1')}"
        return host

    async def stop(self) -> None:
        await self.server.stop()
        await self.engine.stop()

    async def check_health(self) -> None:
        if not self.ranks_are_alive:
            raise RuntimeError("rank 0 is dead")

    async def resolve_address(self) -> str:
        return self.address

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds blocks."""
        stats = self.engine.stats()
        return stats.blocks_held == stats.num_running == stats.num_waiting == 0


@dataclass(frozen=True)
class Stack:
    """One router's frontend and the engine behind it."""

    host: EngineHost
    frontend: Frontend
    engines: EngineDirectory

    @property
    def client(self) -> EngineClient:
        """The client of the only engine."""
        (client,) = self.engines.clients()
        return client

    async def wait_until_idle(self) -> None:
        """Wait until the engine holds nothing and the frontend runs nothing."""
        await eventually(lambda: self.host.is_idle and not self.frontend.num_running)


@contextlib.asynccontextmanager
async def running_stack(
    config: ClusterConfig | None = None, *, step_delay_s: float = 0.0, info: EngineInfo = DEFAULT_INFO
) -> AsyncIterator[Stack]:
    host = await EngineHost.start(info, step_delay_s=step_delay_s)
    model = tiny_model(max_model_len=info.max_model_len)

    async def discover() -> dict[str, str]:
        return {info.engine_id: host.address} if host.address else {}

    engines = EngineDirectory(discover, period_s=0.01, retry_interval_s=0.01)
    frontend = Frontend(config or ClusterConfig(), model, engines, rng=random.Random(0))
    frontend.start()
    await eventually(lambda: frontend.is_ready)
    try:
        yield Stack(host, frontend, engines)
    finally:
        await frontend.stop()
        await host.stop()
        # Cancelled calls of grpc.aio need a turn of the loop to let go of their tasks.
        await asyncio.sleep(0.01)
