"""A whole cluster without Ray: cache manager, engines with agents, routers, and connections that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_agent import EngineAgent
from kvorum.cluster.engine_directory import EngineDirectory
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.channel import ManagerAddress, ManagerLostError
from kvorum.cluster.manager.service import ManagerServer
from kvorum.cluster.manager.tls import ControlTls, read_tls
from kvorum.cluster.manager.types import TenantLimits, TenantView
from kvorum.cluster.tenants import TenantTable
from kvorum.workers.request import EngineInfo
from kvtest.stack import DEFAULT_INFO, EngineHost
from kvtest.tiny_model import tiny_model
from kvtest.waiting import eventually

LEASE_S = 1.0
ENGINE_GRACE_S = 1.0


class ManagerHost:
    """One manager after the other, each with a port and a token of its own."""

    def __init__(self, tenants: Collection[TenantLimits], *, tls: ControlTls | None = None) -> None:
        self._tenants = tenants
        self._tls = tls
        self.learn_s = 0.0  # of the next one
        self.server: ManagerServer | None = None
        self._address: ManagerAddress | None = None

    @property
    def manager(self) -> CacheManager:
        assert self.server, "the manager is up"
        return self.server.manager

    async def start(self) -> None:
        manager = CacheManager(self._tenants, lease_s=LEASE_S, engine_grace_s=ENGINE_GRACE_S)
        server = ManagerServer(manager, token=secrets.token_hex(8), tls=self._tls, learn_s=self.learn_s)
        self._address = ManagerAddress(f"127.0.0.1:{await server.start('127.0.0.1')}", server.token)
        self.server = server

    async def kill(self) -> None:
        assert self.server
        server, self.server, self._address = self.server, None, None
        await server.stop()

    async def find(self) -> ManagerAddress:
        if self._address is None:
            raise ManagerLostError("the manager is dead")
        return self._address

    def tenant(self, name: str) -> TenantView:
        return next(tenant for tenant in self.manager.view().tenants if tenant.tenant == name)


class Wire:
    """A connection's way to the manager; relayed, either direction can be swallowed, or the connection broken."""

    def __init__(self, manager: ManagerHost, *, is_relayed: bool) -> None:
        self._manager = manager
        self._is_relayed = is_relayed
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self.num_relayed = 0
        self.swallows_up = False
        self.swallows_down = False
        self.is_broken = False

    async def find(self) -> ManagerAddress:
        address = await self._manager.find()
        if not self._is_relayed:
            return address
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._listener.setblocking(False)
            self._start(self._accept(self._listener), self._tasks)
        return replace(address, target=f"127.0.0.1:{self._listener.getsockname()[1]}")

    def break_connections(self) -> None:
        """End all connections, and let none come up until `mend`."""
        self.is_broken = True
        for relay in self._relays:
            relay.cancel()

    def mend(self) -> None:
        self.is_broken = self.swallows_up = self.swallows_down = False
        for relay in self._relays:  # what was swallowed is missing in the middle of them
            relay.cancel()

    async def close(self) -> None:
        ending = self._tasks | self._relays
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._listener:
            self._listener.close()

    def _start(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._start(self._relay(near), self._relays)

    async def _relay(self, near: socket.socket) -> None:
        with near, socket.socket() as far:
            far.setblocking(False)
            try:
                if self.is_broken:
                    return
                host, _, port = (await self._manager.find()).target.rpartition(":")
                await asyncio.get_running_loop().sock_connect(far, (host, int(port)))
                self.num_relayed += 1
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(near, far, up=True))
                    group.create_task(self._pump(far, near, up=False))
            except (ExceptionGroup, OSError, ManagerLostError):
                pass
            finally:
                await asyncio.sleep(0)  # until the loop has let go of the sockets

    async def _pump(self, source: socket.socket, target: socket.socket, *, up: bool) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, 2**16):
            if not (self.swallows_up if up else self.swallows_down):
                await loop.sock_sendall(target, data)
        raise ConnectionError("the connection ended")


@dataclass
class GovernedEngine:
    """An engine, its agent, and the wire between that and the manager."""

    host: EngineHost
    wire: Wire
    agent: asyncio.Task[None]


@dataclass
class ManagedCluster:
    """Everything; `frontends[0]` is the first router."""

    manager: ManagerHost
    tenants: TenantTable
    engines: dict[str, GovernedEngine] = field(default_factory=dict)
    frontends: list[Frontend] = field(default_factory=list)

    @property
    def frontend(self) -> Frontend:
        return self.frontends[0]

    @property
    def engine(self) -> GovernedEngine:
        (engine,) = self.engines.values()
        return engine

    async def wait_until_idle(self) -> None:
        """Wait until nothing runs, no lease is left, and the manager's books say so."""
        await eventually(lambda: not any(frontend.num_running for frontend in self.frontends))
        await eventually(lambda: all(engine.host.is_idle for engine in self.engines.values()))
        await eventually(self._books_are_clear)
        self.manager.manager.audit()

    def _books_are_clear(self) -> bool:
        view = self.manager.manager.view()
        engines = {engine.engine_id: engine for engine in view.engines}
        return (
            engines.keys() == self.engines.keys()
            and view.drift_blocks == 0
            and not any(engine.reserved_blocks or engine.held_blocks for engine in view.engines)
            and not any(tenant.num_waiting or tenant.num_running for tenant in view.tenants)
        )


@contextlib.asynccontextmanager
async def managed_cluster(
    config: ClusterConfig | None = None,
    *,
    engines: Mapping[str, EngineInfo] | None = None,
    num_routers: int = 1,
    step_delay_s: float = 0.0,
    relays_engines: bool = False,
) -> AsyncIterator[ManagedCluster]:
    config = config or ClusterConfig()
    tenants = TenantTable(config.tenants)
    tls = read_tls(config.control_tls) if config.control_tls else None
    it = ManagedCluster(ManagerHost(tenants.limits(), tls=tls), tenants)
    await it.manager.start()
    infos = engines or {DEFAULT_INFO.engine_id: DEFAULT_INFO}
    for engine_id, info in infos.items():
        host = await EngineHost.start(replace(info, engine_id=engine_id), step_delay_s=step_delay_s)
        wire = Wire(it.manager, is_relayed=relays_engines)
        agent = asyncio.create_task(EngineAgent(host.engine, wire.find, tls=tls, look_period_s=0.02).run())
        it.engines[engine_id] = GovernedEngine(host, wire, agent)

    async def discover() -> dict[str, str]:
        return {engine_id: engine.host.address for engine_id, engine in it.engines.items()}

    max_model_len = next(iter(infos.values())).max_model_len
    for number in range(num_routers):
        directory = EngineDirectory(discover, period_s=0.01, retry_interval_s=0.01)
        frontend = Frontend(
            config,
            tiny_model(max_model_len=max_model_len),
            directory,
            find_manager=it.manager.find,
            rng=random.Random(number),
        )
        frontend.start()
        it.frontends.append(frontend)
    await eventually(lambda: all(frontend.is_ready and _is_managed(frontend) for frontend in it.frontends))
    await eventually(lambda: len(it.manager.manager.view().engines) == len(it.engines))
    try:
        yield it
    finally:
        for frontend in it.frontends:
            await frontend.stop()
        for engine in it.engines.values():
            engine.agent.cancel()
            await asyncio.wait({engine.agent})
            await engine.host.stop()
        if it.manager.server:
            await it.manager.kill()
        for engine in it.engines.values():
            await engine.wire.close()
        await asyncio.sleep(0.01)


def _is_managed(frontend: Frontend) -> bool:
    return frontend._managed is not None and frontend._managed.link.is_up
