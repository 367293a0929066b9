"""What engines and the cache manager say of themselves, as Prometheus' families. Every router shows the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.manager.types import ClusterView, TenantView
from kvorum.cluster.tenant_labels import TenantLabels

_Value = Callable[[EngineStatus], float]

# (name without kvorum_, help, value).
_ENGINE_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("engine_up", "1 while the engine takes requests.", lambda s: float(s.healthy)),
    ("num_requests_running", "Sequences that the engine runs.", lambda s: s.stats.num_running),
    ("num_requests_waiting", "Sequences that wait in the engine.", lambda s: s.stats.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV blocks that sequences hold, 0 to 1.",
        lambda s: s.stats.blocks_held / s.info.num_blocks,
    ),
    ("kv_blocks_held", "KV blocks that sequences hold.", lambda s: s.stats.blocks_held),
    ("kv_blocks_free", "KV blocks that hold nothing.", lambda s: s.stats.blocks_free),
    ("kv_blocks_cached", "KV blocks kept for their prefix.", lambda s: s.stats.blocks_cached),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("engine_steps", "Steps that the engine made.", lambda s: s.stats.steps_total),
    ("engine_prompt_tokens", "Prompt tokens computed, again ones too.", lambda s: s.stats.prompt_tokens_total),
    ("engine_generation_tokens", "Tokens sampled.", lambda s: s.stats.generation_tokens_total),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.stats.prefix_cache_queries_total,
    ),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.stats.prefix_cache_hits_total),
    ("num_preemptions", "Sequences preempted.", lambda s: s.stats.preemptions_total),
)

_TENANT_PAGES: tuple[tuple[str, Callable[[TenantView], int | None]], ...] = (
    ("held", lambda tenant: tenant.held_blocks),
    ("reserved", lambda tenant: tenant.reserved_blocks),
    ("cached", lambda tenant: tenant.cached_blocks),
    ("floor", lambda tenant: tenant.floor_blocks),
    ("ceiling", lambda tenant: tenant.ceiling_blocks),
)
_TENANT_REQUESTS: tuple[tuple[str, Callable[[TenantView], int | None]], ...] = (
    ("running", lambda tenant: tenant.num_running),
    ("waiting", lambda tenant: tenant.num_waiting),
)


def engine_families(engines: Mapping[str, EngineStatus]) -> Iterator[Metric]:
    """Yield the families of all engines, by id."""
    for name, help_text, value in _ENGINE_GAUGES:
        gauge = GaugeMetricFamily(f"kvorum_{name}", help_text, labels=("engine",))
        for engine_id, status in engines.items():
            gauge.add_metric((engine_id,), value(status))
        yield gauge
    for name, help_text, value in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(f"kvorum_{name}", help_text, labels=("engine",))
        for engine_id, status in engines.items():
            counter.add_metric((engine_id,), value(status))
        yield counter
    evicted = CounterMetricFamily(
        "kvorum_engine_evicted_tokens", "Tokens evicted per KV head.", labels=("engine", "policy")
    )
    for engine_id, status in engines.items():
        for policy, count in status.stats.evicted_tokens_total.items():
            evicted.add_metric((engine_id, policy), count)
    yield evicted


def manager_families(view: ClusterView | None, tenants: TenantLabels) -> list[Metric]:
    """Return the families of the cache manager; of one that cannot be reached, only that it cannot be."""
    up = GaugeMetricFamily("kvorum_manager_up", "1 while this router reaches the cache manager.")
    up.add_metric((), float(view is not None))
    if view is None:
        return [up]
    return [
        up,
        _gauge("page_price", "Worth of the best KV block that some sequence wants and does not get.", view.price),
        _gauge("ledger_drift_pages", "KV blocks by which engines and their tenants disagree.", view.drift_blocks),
        _gauge("lease_age_seconds", "Age of the oldest lease.", view.oldest_lease_s),
        _by_tenant("tenant_kv_pages", "KV blocks of a tenant, by kind.", "kind", _TENANT_PAGES, view, tenants),
        _by_tenant("tenant_requests", "Requests of a tenant, by state.", "state", _TENANT_REQUESTS, view, tenants),
        _reclaimed(view),
    ]


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvorum_{name}", help_text, value=value)


def _by_tenant(
    name: str,
    help_text: str,
    label: str,
    values: tuple[tuple[str, Callable[[TenantView], int | None]], ...],
    view: ClusterView,
    tenants: TenantLabels,
) -> Metric:
    sums: Counter[tuple[str, str]] = Counter()
    for tenant in view.tenants:
        for key, value in values:
            if (amount := value(tenant)) is not None:
                sums[tenants.of(tenant.tenant), key] += amount
    family = GaugeMetricFamily(f"kvorum_{name}", help_text, labels=("tenant", label))
    for labels, amount in sums.items():
        family.add_metric(labels, amount)
    return family


def _reclaimed(view: ClusterView) -> Metric:
    family = CounterMetricFamily(
        "kvorum_reclaimed_pages", "KV blocks got back, by step of the ladder.", labels=("engine", "step")
    )
    for engine in view.engines:
        for step, count in engine.reclaimed.items():
            family.add_metric((engine.engine_id, step), count)
    return family
