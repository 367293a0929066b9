"""Which engines a router is connected to: they come, go and move while requests run.

`discover` says which engines there are and where they listen. For each there is one EngineClient, which connects by
itself, and again when its engine has moved. A client leaves when its engine is no longer there and its stream is down;
an engine that is drained keeps its stream until its last request is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from kvorum.cluster.engine_client import EngineClient
from kvorum.kvstore.errors import EngineLostError

logger = logging.getLogger(__name__)

# Returns each engine's host:port by its id, or raises EngineLostError when that cannot be told now.
Discover = Callable[[], Awaitable[Mapping[str, str]]]


class EngineDirectory:
    """The engine clients of one router, for as long as `run` runs."""

    def __init__(self, discover: Discover, *, period_s: float = 0.5, retry_interval_s: float = 0.2) -> None:
        self._discover = discover
        self._period_s = period_s
        self._retry_interval_s = retry_interval_s
        self._addresses: Mapping[str, str] = {}
        self._clients: dict[str, EngineClient] = {}
        self._connections: dict[str, asyncio.Task[None]] = {}

    def clients(self) -> Collection[EngineClient]:
        """Return the clients of all engines, connected or not."""
        return self._clients.values()

    async def run(self) -> None:
        """Look for engines until cancelled."""
        try:
            while True:
                try:
                    self._addresses = await self._discover()
                except EngineLostError as error:
                    logger.debug("engines unknown: %s", error)
                self._update()
                await asyncio.sleep(self._period_s)
        finally:
            for task in self._connections.values():
                task.cancel()
            await asyncio.gather(*self._connections.values(), return_exceptions=True)

    def _update(self) -> None:
        for engine_id in self._addresses.keys() - self._clients.keys():
            self._clients[engine_id] = self._connect(engine_id)
        for engine_id in self._clients.keys() - self._addresses.keys():
            if self._clients[engine_id].status is None:
                del self._clients[engine_id]
                self._connections.pop(engine_id).cancel()

    def _connect(self, engine_id: str) -> EngineClient:
        async def resolve_address() -> str:
            address = self._addresses.get(engine_id)
            if address is None:
                raise EngineLostError(f"engine {engine_id} is gone")
            return address

        client = EngineClient(resolve_address, retry_interval_s=self._retry_interval_s)
        self._connections[engine_id] = asyncio.create_task(client.run(), name=f"client of {engine_id}")
        return client
