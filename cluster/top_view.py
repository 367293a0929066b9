"""The picture that `kvorum top` draws: engines, tenants, and the ladder's steps as they happen. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView

BAR_WIDTH = 24
MAX_EVENTS = 12


def ladder_events(before: ClusterView, after: ClusterView) -> list[str]:
    """Say which engines got how many blocks back, by which step, between two looks."""
    old = {engine.engine_id: engine.reclaimed for engine in before.engines}
    events = []
    for engine in after.engines:
        if engine.engine_id not in old:
            continue
        for step, count in engine.reclaimed.items():
            if more := count - old[engine.engine_id].get(step, 0):
                events.append(f"{engine.engine_id}: {more} blocks by {step}")
    return events


class TopScreen:
    """Remembers the last look and the latest events."""

    def __init__(self) -> None:
        self._view = ClusterView()
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)

    def update(self, view: ClusterView, *, clock: str) -> RenderableType:
        """Return the picture of a new look; clock: the time of day."""
        self._events.extend(f"{clock} {event}" for event in ladder_events(self._view, view))
        self._view = view
        return Group(_summary(view), _engine_table(view.engines), tenant_table(view.tenants), _event_list(self._events))


def _summary(view: ClusterView) -> Text:
    total = sum(engine.total_blocks for engine in view.engines)
    held = sum(engine.held_blocks for engine in view.engines)
    text = Text(f"{len(view.engines)} engines, {held} of {total} blocks held, price {view.price:.4g}")
    if view.drift_blocks:
        text.append(f", ledger off by {view.drift_blocks} blocks", style="bold red")
    return text


def _engine_table(engines: Iterable[EngineView]) -> Table:
    table = Table(expand=True)
    for name in ("engine", "pool", "held", "reserved", "cached", "free", "leases", "price"):
        table.add_column(name, justify="left" if name in ("engine", "pool") else "right")
    for engine in engines:
        table.add_row(
            engine.engine_id,
            _bar(engine),
            *(str(n) for n in (engine.held_blocks, engine.reserved_blocks, engine.cached_blocks, engine.free_blocks)),
            str(engine.num_leases),
            f"{engine.price:.4g}",
        )
    return table


def _bar(engine: EngineView) -> Text:
    """Draw a pool: held blocks, cached ones, free ones."""
    held = round(BAR_WIDTH * engine.held_blocks / max(1, engine.total_blocks))
    cached = min(BAR_WIDTH - held, round(BAR_WIDTH * engine.cached_blocks / max(1, engine.total_blocks)))
    bar = Text("█" * held, style="green" if held < 0.9 * BAR_WIDTH else "red")
    return bar.append("▒" * cached, style="blue").append("·" * (BAR_WIDTH - held - cached), style="dim")


def tenant_table(tenants: Iterable[TenantView]) -> Table:
    """Draw what tenants hold, reserve and may have."""
    table = Table(expand=True)
    names = ("tenant", "held", "reserved", "cached", "floor", "ceiling", "running", "waiting", "admitted", "refused")
    for name in (*names, "service"):
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for tenant in tenants:
        counts = (
            *(tenant.held_blocks, tenant.reserved_blocks, tenant.cached_blocks, tenant.floor_blocks),
            "-" if tenant.ceiling_blocks is None else tenant.ceiling_blocks,
            *(tenant.num_running, tenant.num_waiting, tenant.admitted_total, sum(tenant.refused_total.values())),
        )
        table.add_row(tenant.tenant, *map(str, counts), f"{tenant.share_of_service:.0%}")
    return table


def _event_list(events: Iterable[str]) -> Text:
    return Text("\n".join(events) or "no block had to be got back yet", style="dim")
