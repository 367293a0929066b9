"""A router's metrics with an engine and a manager to report on, so that all families are there."""

from __future__ import annotations

from dataclasses import replace

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView
from kvorum.cluster.metrics import RouterMetrics
from kvtest.stack import DEFAULT_INFO, IDLE_STATS


def metrics_of_everything() -> RouterMetrics:
    """Return a registry in which every family exists; those by label may have no sample yet."""
    stats = replace(IDLE_STATS, evicted_tokens_total={"h2o": 3})
    metrics = RouterMetrics(("acme",), lambda: {"engine-0": EngineStatus(DEFAULT_INFO, stats)})
    engine = EngineView("engine-0", 64, 8, 9, 4, 52, 2, 0.5, {"shrink": 7})
    tenant = TenantView("acme", 8, 9, 4, 16, 32, 1, 2, 40)
    metrics.show_manager(ClusterView((engine,), (tenant,), price=0.5, drift_blocks=1, oldest_lease_s=2.5))
    return metrics
