"""What each router may give each tenant while the manager cannot be reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvorum.cluster.manager.types import ClusterView, TenantLimits

_NO_LIMITS = TenantLimits("")


@dataclass(frozen=True, slots=True)
class SafeShare:
    """What a tenant may have of one router: blocks that its leases reserve, requests that run, and come in a minute."""

    blocks: int
    max_running: int | None = None
    max_requests_per_minute: int | None = None


def safe_shares(view: ClusterView, tenants: Mapping[str, TenantLimits], *, num_routers: int) -> dict[str, SafeShare]:
    """Split what each tenant may have evenly among the routers.

    A tenant may have its ceiling, but nothing of what others are sure of: so floors stay reachable and ceilings hold
    even when every router uses all of its share. Of requests, at once or a minute, each router gives one at least.
    While no engine is known there is nothing to say.
    """
    total = sum(engine.total_blocks for engine in view.engines)
    if not total:
        return {}
    floors = sum(tenant.floor_blocks for tenant in view.tenants)
    routers = max(1, num_routers)
    shares = {}
    for tenant in view.tenants:
        most = total - (floors - tenant.floor_blocks)
        if tenant.ceiling_blocks is not None:
            most = min(most, tenant.ceiling_blocks)
        limits = tenants.get(tenant.tenant, _NO_LIMITS)
        shares[tenant.tenant] = SafeShare(
            max(0, most) // routers,
            max_running=_part(limits.max_running, routers),
            max_requests_per_minute=_part(limits.max_requests_per_minute, routers),
        )
    return shares


def _part(limit: int | None, num_routers: int) -> int | None:
    return None if limit is None else max(1, limit // num_routers)
