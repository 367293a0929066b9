"""The cache manager as a named Ray actor: construction and delegation.

Whoever needs it first creates it: a cluster that Ray Serve deploys from a file has no process of ours that could. Ray
starts it anew when it dies, with the arguments of its creation and a port of its own; routers bring the tenants that
hold now, engines their snapshots, routers their leases.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from kvorum.cluster.config import LogFormat
from kvorum.cluster.logs import log_to_stderr
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.channel import ManagerAddress, ManagerLostError
from kvorum.cluster.manager.service import LEARN_S, ManagerServer, serve_promptly
from kvorum.cluster.manager.tls import read_tls
from kvorum.cluster.manager.types import TenantLimits

ACTOR_NAME = "kvorum-cache-manager"
ACTOR_NAMESPACE = "kvorum"
# A lease that its router, though it is there, does not renew is taken back after this: something went wrong. Most
# requests are over before their leases are renewed even once.
LEASE_S = 300.0
# An engine that lost its connection has this long to come back before its leases are taken for lost.
ENGINE_GRACE_S = 10.0
_CALL_TIMEOUT_S = 5.0


class _ManagerActor:
    """One manager; its methods are called by routers and engines only to find it and to bring it the tenants."""

    def __init__(self, tenants: Collection[TenantLimits], tls_folder: Path | None, log_format: LogFormat) -> None:
        log_to_stderr(log_format)
        serve_promptly()
        manager = CacheManager(tenants, lease_s=LEASE_S, engine_grace_s=ENGINE_GRACE_S)
        tls = None if tls_folder is None else read_tls(tls_folder)
        self._server = ManagerServer(manager, token=secrets.token_urlsafe(32), tls=tls, learn_s=LEARN_S)
        self._starting = asyncio.Lock()
        self._target: str | None = None

    @ray.method
    async def address(self) -> ManagerAddress:
        """Return where it listens, from the first call on."""
        async with self._starting:
            if self._target is None:
                host: str = ray.util.get_node_ip_address()
                self._target = f"{host}:{await self._server.start(host)}"
        return ManagerAddress(self._target, self._server.token)

    @ray.method
    async def set_tenants(self, tenants: Collection[TenantLimits]) -> None:
        """Take new tenants."""
        self._server.set_tenants(tenants)


ManagerActor = ray.remote(_ManagerActor)


class ManagerHandle:
    """Finds the manager, and makes it where there is none."""

    def __init__(
        self, tls_folder: Path | None, *, log_format: LogFormat, tenants: Collection[TenantLimits] | None = None
    ) -> None:
        """tenants: who there is, for those that know; the manager hears of it each time it is looked for."""
        self._tls_folder = tls_folder
        self._log_format = log_format
        self._tenants = None if tenants is None else tuple(tenants)

    async def set_tenants(self, tenants: Collection[TenantLimits]) -> None:
        """Tell the manager of new tenants, now and each time it is looked for; raises ManagerLostError."""
        self._tenants = tuple(tenants)
        await self.find()

    async def find(self) -> ManagerAddress:
        """Return the manager's address; raises ManagerLostError while it cannot be told."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                actor = await asyncio.to_thread(self._actor)
                if self._tenants is not None:
                    await actor.set_tenants.remote(self._tenants)
                address: ManagerAddress = await actor.address.remote()
                return address
        except (TimeoutError, ray.exceptions.RayError, ValueError) as error:
            raise ManagerLostError(f"the cache manager does not answer: {error!r}") from error

    def _actor(self) -> Any:  # noqa: ANN401  # Ray's handles have no usable type
        actor = ManagerActor.options(
            name=ACTOR_NAME,
            namespace=ACTOR_NAMESPACE,
            get_if_exists=True,
            # It must outlive whoever was first, and is ended by whoever stops the cluster.
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=1000,
        )
        return actor.remote(self._tenants or (), self._tls_folder, self._log_format)


def kill_manager() -> None:
    """End the cluster's manager, if there is one."""
    try:
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=ACTOR_NAMESPACE), no_restart=True)
    except ValueError:
        return
