"""What tenants have at most: reserved blocks and elastic allowances together stay below each ceiling. Pure.

Allowances follow demand about once a second, or as often as all engines can be told, by price (shares.py); where they
are in the way of a request they are lowered at once, and the request waits until the engines have acknowledged that. So
that most requests need not wait, a part of the ceiling is never given away as allowances.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from kvorum.cluster.manager.allowances import Allowances
from kvorum.cluster.manager.ledger import Ledger, in_blocks
from kvorum.cluster.manager.pacing import share_period_s
from kvorum.cluster.manager.shares import Demand, split
from kvorum.cluster.manager.types import TenantLimits
from kvorum.workers.governance import EngineReport, TenantUse

# Lowering allowances once more before the engines can have acknowledged the last time changes nothing.
_LOWER_PERIOD_S = 0.05
_FREE_PART = 16
_NO_USE = TenantUse()


class Ceilings:
    """Ceilings of all tenants that have one; `allowances` are what follows from them."""

    def __init__(self, ledger: Ledger, tenants: Collection[TenantLimits]) -> None:
        self._ledger = ledger
        self._limits = _ceilings(tenants)
        self.allowances = Allowances(self._limits)
        # By tenant, what it wants on each connected engine.
        self._demands = self._read_demands()
        # Tenants to be shared anew, with the blocks that the head of their line lacks, and when each last was.
        self._due = dict.fromkeys(self._limits, 0)
        self._shared_s = dict[str, float]()
        self._turn_s = -math.inf  # when a tenant's turn last was
        # For how many blocks each tenant's allowances were last lowered.
        self._lowered: dict[str, int] = {}

    @property
    def tenants(self) -> Collection[str]:
        """Those that have a ceiling."""
        return self._limits.keys()

    def set_tenants(self, tenants: Collection[TenantLimits]) -> None:
        """Take new ceilings."""
        self._limits = _ceilings(tenants)
        self.allowances.set_limited(self._limits)
        self._demands = self._read_demands()
        self._due, self._lowered = dict.fromkeys(self._limits, 0), {}
        self._shared_s = {name: shared_s for name, shared_s in self._shared_s.items() if name in self._limits}

    def blocks_of(self, tenant: str) -> int | None:
        """Return a tenant's ceiling; None is none."""
        limit = self._limits.get(tenant)
        return None if limit is None else in_blocks(limit, self._ledger.total_blocks)

    def admits(self, tenant: str, blocks: int) -> bool:
        """Whether a tenant may reserve more; where allowances are in the way they will be lowered."""
        ceiling = self.blocks_of(tenant)
        if ceiling is None:
            return True
        left = ceiling - self._ledger.reserved[tenant]
        if blocks > left:
            return False
        self._due.setdefault(tenant, 0)
        if blocks <= left - self.allowances.total(tenant) and not self._is_unsettled(tenant):
            return True
        self._due[tenant] = max(self._due[tenant], blocks)
        return False

    def take_report(self, engine_id: str, report: EngineReport) -> None:
        """Note what is wanted on a connected engine; share anew what is wanted elsewhere than before."""
        for tenant, demands in self._demands.items():
            known, demand = demands.get(engine_id), _demand(report, tenant)
            if demand != known:
                demands[engine_id] = demand
                self._due.setdefault(tenant, 0)

    def keep(self, engine_id: str, report: EngineReport) -> None:
        """Let an engine that connects go on with what elastic sequences hold there, as far as ceilings go.

        Else its first directive would take from them what they may have again a moment later.
        """
        for tenant in self._limits:
            ceiling, elastic = self.blocks_of(tenant), _use(report, tenant).elastic
            assert ceiling is not None, "it has a limit"
            self.allowances.raise_to(engine_id, tenant, elastic, ceiling - self._ledger.reserved[tenant])

    def reconsider(self, tenant: str) -> None:
        """Share a tenant's room anew: it has reserved something that was not asked for here."""
        if tenant in self._limits:
            self._due.setdefault(tenant, 0)

    def forget(self, engine_id: str) -> None:
        """Share out nothing to an engine that is not connected any more."""
        for demands in self._demands.values():
            demands.pop(engine_id, None)

    @property
    def is_lowering(self) -> bool:
        """Whether some tenant's allowances were last set to make room for a request."""
        return any(self._lowered.values())

    def share(self, now_s: float) -> None:
        """Set the allowances of tenants that have none yet or whose heads lack room, and of one more if it is time.

        Tenants take turns over the period: among a thousand engines one takes some milliseconds, in which nobody is
        admitted.
        """
        waiting_s = {tenant: now_s - self._shared_s.get(tenant, -math.inf) for tenant in self._due}
        urgent = [
            tenant
            for tenant, lacking in self._due.items()
            if tenant not in self._shared_s
            or lacking > self._lowered.get(tenant, 0)
            or (lacking and waiting_s[tenant] >= _LOWER_PERIOD_S)
        ]
        longest = max(waiting_s, key=waiting_s.__getitem__, default=None)
        period_s = share_period_s(len(self._ledger.engines))
        is_turn = now_s - self._turn_s >= period_s / max(1, len(self._limits))
        if longest is not None and longest not in urgent and waiting_s[longest] >= period_s and is_turn:
            urgent.append(longest)
            self._turn_s = now_s
        for tenant in urgent:
            self._shared_s[tenant], self._lowered[tenant] = now_s, self._due[tenant]
            if not self._share(tenant, self._due.pop(tenant)):
                self._due[tenant] = 0

    def _share(self, tenant: str, lacking: int) -> bool:
        ceiling = self.blocks_of(tenant)
        assert ceiling is not None, "only tenants with a ceiling are due"
        room = max(0, ceiling - self._ledger.reserved[tenant] - lacking - ceiling // _FREE_PART)
        demands = self._demands[tenant]
        allowances = split(demands, room - self.allowances.elsewhere(tenant, demands)).allowances
        return self.allowances.share(tenant, allowances, room)

    def _read_demands(self) -> dict[str, dict[str, Demand]]:
        connected = [engine for engine in self._ledger.engines.values() if engine.is_connected]
        return {
            tenant: {engine.engine_id: _demand(engine.report, tenant) for engine in connected}
            for tenant in self._limits
        }

    def _is_unsettled(self, tenant: str) -> bool:
        """Whether some engine that runs a tenant's sequences may not know its limit."""
        engines = (self._ledger.engines[engine_id] for engine_id in self.allowances.unsettled)
        return any(engine.reserved[tenant] or _use(engine.report, tenant).held for engine in engines)


def _ceilings(tenants: Collection[TenantLimits]) -> dict[str, int | float]:
    return {tenant.name: tenant.ceiling for tenant in tenants if tenant.ceiling is not None}


def _use(report: EngineReport, tenant: str) -> TenantUse:
    return report.tenants.get(tenant, _NO_USE)


def _demand(report: EngineReport, tenant: str) -> Demand:
    return Demand(_use(report, tenant).worths, report.price)
