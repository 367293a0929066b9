"""What Prometheus scrapes from a router: what its engines reported last, and what it counted itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvorum.cluster.engine_status import EngineStatus
from kvorum.workers.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Kind = Literal["gauge", "counter"]

# (name, kind, help, value); a counter's name gets `_total` on the wire.
_ENGINE_METRICS: tuple[tuple[str, _Kind, str, Callable[[EngineStatus], float]], ...] = (
    ("kvorum_engine_up", "gauge", "1 while the engine takes requests.", lambda s: float(s.healthy)),
    ("kvorum_num_requests_running", "gauge", "Sequences that the engine runs.", lambda s: s.stats.num_running),
    ("kvorum_num_requests_waiting", "gauge", "Sequences that wait in the engine.", lambda s: s.stats.num_waiting),
    (
        "kvorum_kv_cache_usage_perc",
        "gauge",
        "Share of the KV blocks that sequences hold, 0 to 1.",
        lambda s: s.stats.blocks_held / s.info.num_blocks,
    ),
    ("kvorum_kv_blocks_held", "gauge", "KV blocks that sequences hold.", lambda s: s.stats.blocks_held),
    ("kvorum_kv_blocks_free", "gauge", "KV blocks that hold nothing.", lambda s: s.stats.blocks_free),
    ("kvorum_kv_blocks_cached", "gauge", "KV blocks kept for their prefix.", lambda s: s.stats.blocks_cached),
    ("kvorum_engine_steps", "counter", "Steps that the engine made.", lambda s: s.stats.steps_total),
    ("kvorum_prompt_tokens", "counter", "Prompt tokens computed.", lambda s: s.stats.prompt_tokens_total),
    ("kvorum_generation_tokens", "counter", "Tokens generated.", lambda s: s.stats.generation_tokens_total),
    (
        "kvorum_prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.stats.prefix_cache_queries_total,
    ),
    (
        "kvorum_prefix_cache_hits",
        "counter",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.stats.prefix_cache_hits_total,
    ),
    ("kvorum_num_preemptions", "counter", "Sequences preempted.", lambda s: s.stats.preemptions_total),
)


class RouterMetrics:
    """One router's registry."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStatus]]) -> None:
        """Report on the engines that `engines` returns, by id, at each scrape."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines))
        self._finished = Counter(
            "kvorum_request_success",
            "Sequences that ended well.",
            ("finished_reason",),
            registry=self._registry,
        )
        self._rejected = Counter(
            "kvorum_admission_rejections",
            "Requests that were turned away before an engine took them.",
            ("reason",),
            registry=self._registry,
        )

        self._resumed = Counter(
            "kvorum_request_resumes",
            "Times that a request which lost its engine went on with another.",
            registry=self._registry,
        )

    def count_resume(self) -> None:
        """Count a request that went on with another engine."""
        self._resumed.inc()

    def count_finish(self, reason: FinishReason) -> None:
        """Count a sequence that ended well."""
        self._finished.labels(reason.value).inc()

    def count_rejection(self, reason: str) -> None:
        """Count a request that was turned away."""
        self._rejected.labels(reason).inc()

    def render(self) -> bytes:
        """Write everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engines: Callable[[], Mapping[str, EngineStatus]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        engines = self._engines()
        for name, kind, help_text, value in _ENGINE_METRICS:
            family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(
                name, help_text, labels=("engine",)
            )
            for engine_id, status in engines.items():
                family.add_metric((engine_id,), value(status))
            yield family
        evicted = CounterMetricFamily(
            "kvorum_evicted_tokens", "Tokens evicted per KV head.", labels=("engine", "policy")
        )
        for engine_id, status in engines.items():
            for policy, count in status.stats.evicted_tokens_total.items():
                evicted.add_metric((engine_id, policy), count)
        yield evicted
