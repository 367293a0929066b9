"""What each router may give each tenant while the manager cannot be reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvorum.cluster.manager.types import TenantLimits

_NO_LIMITS = TenantLimits("")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Blocks of the whole cluster that a tenant is sure of, and that it may have."""

    floor: int
    ceiling: int | None


@dataclass(frozen=True, slots=True)
class SafeShare:
    """What a tenant may have of one router: blocks that its leases reserve, requests that run, and come in a minute."""

    blocks: int
    max_running: int | None = None
    max_requests_per_minute: int | None = None


def safe_shares(
    total_blocks: int, bounds: Mapping[str, Bounds], tenants: Mapping[str, TenantLimits], *, num_routers: int
) -> dict[str, SafeShare]:
    """Split what each tenant may have evenly among the routers.

    A tenant may have its ceiling, but nothing of what others are sure of: so floors stay reachable and ceilings hold
    even when every router uses all of its share. Of requests, at once or a minute, each router gives one at least.
    While no engine is known there is nothing to say.
    """
    if not total_blocks:
        return {}
    floors = sum(bound.floor for bound in bounds.values())
    routers = max(1, num_routers)
    shares = {}
    for name, bound in bounds.items():
        most = total_blocks - (floors - bound.floor)
        if bound.ceiling is not None:
            most = min(most, bound.ceiling)
        limits = tenants.get(name, _NO_LIMITS)
        shares[name] = SafeShare(
            max(0, most) // routers,
            max_running=_part(limits.max_running, routers),
            max_requests_per_minute=_part(limits.max_requests_per_minute, routers),
        )
    return shares


def _part(limit: int | None, num_routers: int) -> int | None:
    return None if limit is None else max(1, limit // num_routers)
