"""Admission by the cluster's cache manager; without it, by this router alone and inside safe bounds.

While the manager cannot be reached a router admits by its engines' own free blocks, inside the share that each tenant
last had; what does not fit, or comes too often, waits. The manager's return reconciles: it hears of these leases with
the first beat. A router that was never told of shares knows no bounds; it waits for a manager that is there but still
learns what runs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from kvorum.cluster.admission import RETRY_AFTER_S, Demand, Lease, LocalAdmission, check_fits
from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.manager.channel import FindManager, ManagerLostError
from kvorum.cluster.manager.meters import TokenBucket
from kvorum.cluster.manager.safe_shares import SafeShare
from kvorum.cluster.manager.tls import ControlTls
from kvorum.cluster.manager.types import AdmitRequest, LeaseRecord, Refusal, Refused
from kvorum.cluster.manager_link import ManagerLink, OnAnswer
from kvorum.cluster.prefix_affinity import prefix_runs
from kvorum.kvstore.errors import (
    CapacityError,
    DeadlineError,
    EngineLostError,
    KvorumError,
    NeverFitsError,
    QuotaError,
    RateLimitError,
)

# How often what does not fit while the manager is away is tried again.
_SAFE_MODE_PERIOD_S = 0.05
# How long an engine that the manager knows may take to be connected here too.
_ENGINE_WAIT_S = 2.0
_ENGINE_PERIOD_S = 0.05


class ManagedAdmission:
    """Admission through the manager; see admission.Admission."""

    def __init__(
        self,
        find: FindManager,
        engines: Callable[[], Mapping[str, EngineStatus]],
        *,
        router_id: str,
        tls: ControlTls | None = None,
        on_answer: OnAnswer,
    ) -> None:
        """engines: returns the healthy engines that this router is connected to, by id."""
        self._engines = engines
        self._safe = _SafeMode(engines)
        self.link = ManagerLink(find, router_id=router_id, tls=tls, on_answer=on_answer)

    async def run(self) -> None:
        """Keep the connection to the manager until cancelled."""
        await self.link.run()

    async def admit(self, demand: Demand) -> Lease:
        """Wait for a lease; see Admission."""
        try:
            async with asyncio.timeout(demand.max_wait_s):
                return await self._admit(demand)
        except TimeoutError:
            raise DeadlineError(f"no room was found within {demand.max_wait_s:g} s") from None

    async def release(self, lease_id: str, *, has_ended: bool) -> None:
        """Give a lease back; see Admission."""
        if lease_id in self.link.held:
            await self._safe.release(lease_id, has_ended=has_ended)
            self.link.release(lease_id, has_ended=has_ended)

    async def _admit(self, demand: Demand) -> Lease:
        # Ids of their own for each try: what a manager that was lost decided for one, and is told to release, must not
        # be taken for another's.
        lease_ids = (f"{demand.lease_id}.{number}" for number in itertools.count(1))
        while True:
            engines = self._engines()
            check_fits(demand, engines)
            try:
                lease = await self._ask_manager(demand, engines, next(lease_ids))
            except ManagerLostError:
                lease = self._decide_alone(demand, engines, next(lease_ids))
            if lease is not None:
                self._safe.note(lease, demand.tenant)
                return lease
            await asyncio.sleep(_SAFE_MODE_PERIOD_S)

    async def _ask_manager(self, demand: Demand, engines: Mapping[str, EngineStatus], lease_id: str) -> Lease | None:
        """Return the manager's lease; None when its engine cannot be reached from here."""
        block_size = min(status.info.block_size for status in engines.values())
        blocks = demand.sequence_blocks(block_size)
        request = AdmitRequest(
            lease_id=lease_id,
            tenant=demand.tenant,
            sequence_blocks=blocks,
            tokens=sum(demand.context_tokens),
            max_wait_s=demand.max_wait_s,
            priority=demand.priority,
            prefix_runs=prefix_runs(demand.prompt, demand.cache_salt),
        )
        answer = await self.link.admit(request)
        if isinstance(answer, Refused):
            _raise_refusal(answer)
        has_engine = False
        try:
            has_engine = await self._is_connected(answer)
            return Lease(lease_id, answer, blocks) if has_engine else None
        finally:
            if not has_engine:
                self.link.release(lease_id, has_ended=False)

    async def _is_connected(self, engine_id: str) -> bool:
        """Wait until an engine is connected and healthy here too; False if that takes too long."""
        try:
            async with asyncio.timeout(_ENGINE_WAIT_S):
                while engine_id not in self._engines():
                    await asyncio.sleep(_ENGINE_PERIOD_S)
        except TimeoutError:
            return False
        return True

    def _decide_alone(self, demand: Demand, engines: Mapping[str, EngineStatus], lease_id: str) -> Lease | None:
        """Return a lease inside the tenant's safe share; None when it does not fit now, or shares are on their way."""
        if self.link.is_learning and not self.link.shares:
            return None
        share = self.link.shares.get(demand.tenant)
        try:
            lease = self._safe.decide_within(demand, engines, lease_id, share, now_s=time.monotonic())
        except CapacityError:
            return None
        self.link.held.add(LeaseRecord(lease_id, demand.tenant, lease.engine_id, lease.sequence_blocks))
        return lease


class _SafeMode(LocalAdmission):
    """Knows all leases of this router, and admits only where there are free blocks for what is reserved."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStatus]]) -> None:
        super().__init__(engines)
        self._tenants: dict[str, str] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def note(self, lease: Lease, tenant: str) -> None:
        """Take in a lease, whoever granted it."""
        self._take(lease)
        self._tenants[lease.lease_id] = tenant

    async def release(self, lease_id: str, *, has_ended: bool) -> None:
        await super().release(lease_id, has_ended=has_ended)
        self._tenants.pop(lease_id, None)

    def decide_within(
        self,
        demand: Demand,
        engines: Mapping[str, EngineStatus],
        lease_id: str,
        share: SafeShare | None,
        *,
        now_s: float,
    ) -> Lease:
        """Grant a lease on an engine that has room; raise CapacityError where there is none, or no more of the share.

        share: None for a tenant that the manager never spoke of, which has as much as there is.
        """
        own = [self._leases[key] for key, tenant in self._tenants.items() if tenant == demand.tenant]
        if share and share.max_running is not None and len(own) >= share.max_running:
            raise CapacityError("the tenant runs as many requests as it may", retry_after_s=RETRY_AFTER_S)
        roomy = {}
        for engine_id, status in self._with_room(demand, engines).items():
            blocks = sum(demand.sequence_blocks(status.info.block_size))
            used = sum(sum(lease.sequence_blocks) for lease in own)
            if blocks <= self._free_blocks(status) and (share is None or used + blocks <= share.blocks):
                roomy[engine_id] = status
        if not roomy:
            raise CapacityError("no engine has room", retry_after_s=RETRY_AFTER_S)
        if share and share.max_requests_per_minute is not None:
            self._take_token(demand.tenant, share.max_requests_per_minute, now_s)
        return self.grant(demand, roomy, lease_id)

    def _take_token(self, tenant: str, per_minute: int, now_s: float) -> None:
        bucket = self._buckets.setdefault(tenant, TokenBucket.full(per_minute, now_s))
        bucket.per_minute = per_minute
        if wait_s := bucket.take(now_s):
            raise CapacityError("the tenant sent as many requests as it may", retry_after_s=wait_s)

    def _free_blocks(self, status: EngineStatus) -> int:
        return status.info.num_blocks - max(status.stats.blocks_held, self._blocks[status.info.engine_id])


def _raise_refusal(refused: Refused) -> NoReturn:
    retry_after_s = refused.retry_after_s or RETRY_AFTER_S
    errors: dict[Refusal, KvorumError] = {
        Refusal.NEVER_FITS: NeverFitsError(refused.message),
        Refusal.CONCURRENCY: RateLimitError(refused.message, retry_after_s=retry_after_s),
        Refusal.RATE: RateLimitError(refused.message, retry_after_s=retry_after_s),
        Refusal.QUOTA: QuotaError(refused.message, retry_after_s=retry_after_s),
        Refusal.CAPACITY: CapacityError(refused.message, retry_after_s=retry_after_s),
        Refusal.UNKNOWN_TENANT: CapacityError(refused.message, retry_after_s=retry_after_s),
        Refusal.NO_ENGINE: EngineLostError(refused.message),
        Refusal.DEADLINE: DeadlineError(refused.message),
    }
    raise errors[refused.reason]
