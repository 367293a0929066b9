"""What changed between two looks at the cluster, so that watchers need the whole only once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView


@dataclass(frozen=True, slots=True)
class ViewChange:
    """Engines and tenants that are new or different, and those that are gone."""

    engines: tuple[EngineView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    gone_engines: tuple[str, ...] = ()
    gone_tenants: tuple[str, ...] = ()
    price: float = 0.0
    drift_blocks: int = 0
    oldest_lease_s: float = 0.0


def difference(before: ClusterView, after: ClusterView) -> ViewChange:
    """Return what must be applied to `before` to get `after`."""
    old_engines = {engine.engine_id: engine for engine in before.engines}
    old_tenants = {tenant.tenant: tenant for tenant in before.tenants}
    return ViewChange(
        engines=tuple(engine for engine in after.engines if old_engines.pop(engine.engine_id, None) != engine),
        tenants=tuple(tenant for tenant in after.tenants if old_tenants.pop(tenant.tenant, None) != tenant),
        gone_engines=tuple(old_engines),
        gone_tenants=tuple(old_tenants),
        price=after.price,
        drift_blocks=after.drift_blocks,
        oldest_lease_s=after.oldest_lease_s,
    )


def apply(before: ClusterView, change: ViewChange) -> ClusterView:
    """Return the view after a change, engines and tenants by name."""
    engines = {engine.engine_id: engine for engine in (*before.engines, *change.engines)}
    tenants = {tenant.tenant: tenant for tenant in (*before.tenants, *change.tenants)}
    return replace(
        before,
        engines=tuple(engines[name] for name in sorted(engines.keys() - set(change.gone_engines))),
        tenants=tuple(tenants[name] for name in sorted(tenants.keys() - set(change.gone_tenants))),
        price=change.price,
        drift_blocks=change.drift_blocks,
        oldest_lease_s=change.oldest_lease_s,
    )
