"""What the manager shows of itself. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvorum.cluster.manager.ceilings import Ceilings
from kvorum.cluster.manager.ledger import Engine, Ledger
from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView
from kvorum.cluster.manager.waiting_room import WaitingRoom


def tenant_names(ledger: Ledger, room: WaitingRoom) -> set[str]:
    """Return tenants that there are, and those that are gone but still run something."""
    return {*room.tenants, *(name for name, blocks in ledger.reserved.items() if blocks)}


def view_of(ledger: Ledger, ceilings: Ceilings, room: WaitingRoom) -> ClusterView:
    """Return the manager's whole knowledge; costs engines * tenants."""
    engines = [ledger.engines[name] for name in sorted(ledger.engines)]
    served = {name: tenant.served.amount for name, tenant in room.tenants.items()}
    everything = sum(served.values())
    held, cached = Counter[str](), Counter[str]()
    for engine in engines:
        for name, use in engine.report.tenants.items():
            held[name] += use.held
            cached[name] += use.cached
    tenants = []
    for name in sorted(tenant_names(ledger, room)):
        tenant = room.tenants.get(name)
        tenants.append(
            TenantView(
                tenant=name,
                held_blocks=held[name],
                reserved_blocks=ledger.reserved[name],
                cached_blocks=cached[name],
                floor_blocks=ledger.floor_blocks(name),
                ceiling_blocks=ceilings.blocks_of(name),
                num_running=ledger.running[name],
                num_waiting=len(tenant.line) if tenant else 0,
                admitted_total=tenant.admitted if tenant else 0,
                refused_total=dict(tenant.refused) if tenant else {},
                share_of_service=served.get(name, 0.0) / everything if everything else 0.0,
            )
        )
    return ClusterView(
        engines=tuple(map(_engine_view, engines)),
        tenants=tuple(tenants),
        price=max((engine.report.price for engine in engines), default=0.0),
        drift_blocks=_drift(engines),
    )


def _engine_view(engine: Engine) -> EngineView:
    return EngineView(
        engine_id=engine.engine_id,
        total_blocks=engine.total_blocks,
        held_blocks=engine.report.held_blocks,
        reserved_blocks=engine.reserved_blocks,
        cached_blocks=engine.report.cached_blocks,
        free_blocks=engine.report.free_blocks,
        num_leases=len(engine.leases),
        price=engine.report.price,
        reclaimed={step.value: count for step, count in engine.report.reclaimed.items()},
    )


def _drift(engines: Iterable[Engine]) -> int:
    return sum(
        abs(engine.report.held_blocks - sum(use.held for use in engine.report.tenants.values())) for engine in engines
    )
